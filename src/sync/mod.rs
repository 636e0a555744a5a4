//! What tasks of a server need between them.
//!
//! | | reaches | |
//! |---|---|---|
//! | [`Semaphore`] | tasks of one worker | at most so many do something at a time |
//! | [`Notify`] | tasks of one worker | something has changed |
//! | [`ShutdownToken`] | tasks of one worker | something is to end |
//! | [`Group`] | connections of one worker | the same bytes to many, queued without a copy |
//! | [`Broadcast`] | connections of all workers | the same, and from other threads |
//! | `channel` (with the feature of that name) | everybody | messages, to whoever takes them first: the crate `async-channel` |
//!
//! The first four belong to one thread and use no atomic operation. What goes between workers goes through their
//! mailboxes, or a channel: any crate whose futures need no runtime of their own will do, since wakers of this
//! runtime's tasks may be called from everywhere.
//!
//! | file | what is in it |
//! |---|---|
//! | `list.rs` | the queue that the others wait in |
//! | `semaphore.rs`, `notify.rs`, `token.rs` | see above |
//! | `group.rs` | [`Group`] |
//! | `broadcast.rs` | [`Broadcast`] |

mod broadcast;
mod group;
mod list;
mod notify;
mod semaphore;
mod token;

pub(crate) use broadcast::Groups;
pub use broadcast::{Broadcast, BroadcastSent};
pub use group::{Group, GroupSent, Member};
pub(crate) use list::List;
pub use notify::{Notified, Notify};
pub use semaphore::{AcquireError, OwnedPermit, Permit, Semaphore, TryAcquireError};
pub use token::ShutdownToken;

/// Channels between tasks, workers and foreign threads: the crate
/// [`async-channel`](https://docs.rs/async-channel), as it is.
///
/// Its futures need no runtime, so both ends may be anywhere: in tasks of any worker, in other runtimes, and in plain
/// threads (`send_blocking`, `recv_blocking`).
///
/// A receiver for whom there is always a message never waits, and so keeps other tasks of its worker from running: in
/// a loop that does nothing else, let [`task::consume_budget`](crate::task::consume_budget) come between.
///
/// ```
/// use corelane::sync::channel;
///
/// let (to, from) = channel::bounded(16);
/// let thread = std::thread::spawn(move || {
///     for n in 1..=100u64 {
///         to.send_blocking(n).expect("somebody receives"); // waits while 16 are not taken
///     }
/// });
/// let sum = corelane::task::block_on(async move {
///     let mut sum = 0;
///     while let Ok(n) = from.recv().await {
///         sum += n;
///     }
///     sum // every sender is gone
/// })?;
/// assert_eq!(sum, 5050);
/// # thread.join().unwrap();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[cfg(feature = "channel")]
pub use async_channel as channel;

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Wake, Waker};

    /// A waker that says whether it was used.
    #[derive(Clone, Default)]
    pub(super) struct Bell(Arc<Inner>);

    #[derive(Default)]
    struct Inner(AtomicBool);

    impl Wake for Inner {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    impl Bell {
        pub(super) fn waker(&self) -> Waker {
            self.0.clone().into()
        }

        pub(super) fn has_rung(&self) -> bool {
            self.0.0.load(Ordering::Relaxed)
        }
    }
}
