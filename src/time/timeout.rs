//! A limit for a future.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::pin;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::clock::Time;

use super::sleep::{Sleep, sleep, sleep_until};

/// Gives a future `limit` of time. When that is over the future is dropped, which on everything of this crate loses
/// nothing: what had arrived by then is there for the next receive.
///
/// ```
/// use corelane::time::{sleep, timeout};
/// use std::time::Duration;
///
/// corelane::task::block_on(async {
///     assert_eq!(timeout(Duration::from_secs(9), async { 7 }).await, Ok(7));
///     let late = timeout(Duration::from_millis(2), sleep(Duration::from_secs(9))).await;
///     assert_eq!(std::io::Error::from(late.unwrap_err()).kind(), std::io::ErrorKind::TimedOut);
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Elapsed`], which becomes an [`io::Error`] of kind `TimedOut` by `?`.
///
/// # Panics
/// Outside of a task.
pub fn timeout<F: Future>(limit: Duration, future: F) -> impl Future<Output = Result<F::Output, Elapsed>> {
    race(sleep(limit), future)
}

/// Gives a future until `due`; see [`timeout`].
///
/// # Errors
/// [`Elapsed`].
///
/// # Panics
/// Outside of a task.
pub fn timeout_at<F: Future>(due: Time, future: F) -> impl Future<Output = Result<F::Output, Elapsed>> {
    race(sleep_until(due), future)
}

async fn race<F: Future>(limit: Sleep, future: F) -> Result<F::Output, Elapsed> {
    let mut future = pin!(future);
    let mut limit = pin!(limit);
    std::future::poll_fn(|cx: &mut Context<'_>| {
        // The future first: what is there is not lost to a limit that passes in the same turn.
        if let Poll::Ready(value) = future.as_mut().poll(cx) {
            return Poll::Ready(Ok(value));
        }
        limit.as_mut().poll_limit(cx).map(|()| Err(Elapsed(())))
    })
    .await
}

/// The limit of a [`timeout`] has passed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Elapsed(());

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not done within its time limit")
    }
}

impl fmt::Debug for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Elapsed")
    }
}

impl std::error::Error for Elapsed {}

impl From<Elapsed> for io::Error {
    fn from(elapsed: Elapsed) -> Self {
        io::Error::new(io::ErrorKind::TimedOut, elapsed)
    }
}
