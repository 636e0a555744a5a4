//! Waking a worker from any thread: a packet without an operation.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::driver::Waker;

use super::port::{self, Port};

/// Wakes one driver. Keeps its port open, so that the handle can never come to mean another.
#[derive(Clone)]
pub struct IocpWaker(Arc<Port>);

impl IocpWaker {
    pub(super) fn new(port: &Arc<Port>) -> Self {
        Self(Arc::clone(port))
    }
}

impl Waker for IocpWaker {
    fn wake(&self) {
        // Whoever finds it posted already knows that the driver looks after this: it takes the mark down
        // before it reports the wake.
        if !self.0.waking.swap(true, Ordering::AcqRel) {
            self.0.post(0, port::WAKE, std::ptr::null_mut());
        }
    }
}
