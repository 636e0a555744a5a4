//! Waking an epoll wait from any thread: an event counter that is watched edge-triggered, so that every
//! write is told of and none needs to be read.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::driver::{Waker, sys};

/// Wakes one driver. It may outlive it.
#[derive(Clone)]
pub struct EpollWaker(Arc<OwnedFd>);

impl EpollWaker {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self(Arc::new(sys::eventfd()?)))
    }

    pub(super) fn counter(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Waker for EpollWaker {
    fn wake(&self) {
        sys::eventfd_write(&self.0);
    }
}
