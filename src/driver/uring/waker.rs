//! Waking a ring: from any thread by an event counter that the ring reads, from another ring's
//! thread by a message between rings, which costs no system call of its own.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use crate::driver::{Waker, sys};

/// Wakes one ring.
#[derive(Clone)]
pub struct UringWaker(Arc<Inner>);

struct Inner {
    eventfd: OwnedFd,
    /// A descriptor of its own, so that the number can never come to mean another ring.
    ring: OwnedFd,
}

impl UringWaker {
    pub(crate) fn new(ring: RawFd) -> std::io::Result<Self> {
        Ok(Self(Arc::new(Inner { eventfd: sys::eventfd()?, ring: sys::duplicate(ring)? })))
    }

    pub(crate) fn eventfd(&self) -> RawFd {
        self.0.eventfd.as_raw_fd()
    }

    pub(crate) fn ring(&self) -> RawFd {
        self.0.ring.as_raw_fd()
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Waker for UringWaker {
    fn wake(&self) {
        sys::eventfd_write(&self.0.eventfd);
    }
}
