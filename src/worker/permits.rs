//! The total of connections over all workers, as permits: a connection holds one from before its
//! handler hears of it until its slot is vacant.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

#[derive(Clone)]
pub(crate) struct Permits {
    free: Arc<AtomicI64>,
}

impl Permits {
    pub(crate) fn new(total: u64) -> Self {
        Self { free: Arc::new(AtomicI64::new(i64::try_from(total).unwrap_or(i64::MAX))) }
    }

    /// Permits not taken; a hint, since other workers take and give back.
    pub(crate) fn free(&self) -> u64 {
        self.free.load(Ordering::Relaxed).max(0) as u64
    }

    /// Takes one if there is one.
    pub(crate) fn try_take(&self) -> bool {
        let taken =
            self.free.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |free| (free > 0).then(|| free - 1));
        taken.is_ok()
    }

    pub(crate) fn give_back(&self, n: u32) {
        self.free.fetch_add(n.into(), Ordering::AcqRel);
    }
}
