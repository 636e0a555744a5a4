//! What the tests of cancellation share, in simulated worlds and on the real kernel: ways to let a future run for a while
//! and then to drop it where it is.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use corelane::task::yield_now;
use corelane::time::{sleep, timeout};
use futures::future::{Either, select};

/// How many ways there are.
pub const WAYS: u64 = 6;

/// Polls a future for so long as chance has it (`below(n)` is a number less than `n`), and then drops it where it is:
/// before its first poll, after some polls (some of them for nothing), when it was woken and before it is polled again,
/// when something else was ready, or at some time before `window` is over. One that is not woken is dropped after
/// `patience`.
pub async fn cut<F: Future>(
    way: u64,
    below: impl Fn(u64) -> u64,
    window: Duration,
    patience: Duration,
    future: F,
) -> Option<F::Output> {
    match way {
        0 => polled(future, below(4), below(2) == 0, patience).await,
        1 | 2 => timeout(Duration::from_micros(below(window.as_micros() as u64)), future).await.ok(),
        // A poll that finds both over.
        3 => timeout(Duration::ZERO, future).await.ok(),
        4 => woken(future, patience).await,
        _ => match select(pin!(future), pin!(yield_now())).await {
            Either::Left((output, _)) => Some(output),
            Either::Right(_) => None,
        },
    }
}

/// Polls a future at most so many times.
async fn polled<F: Future>(future: F, times: u64, needlessly: bool, patience: Duration) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = times;
    // Somebody must look at it again when nothing comes.
    let mut limit = pin!(sleep(patience));
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        if left == 0 || limit.as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        if needlessly {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    })
    .await
}

/// Polls a future once, and drops it as soon as it is woken: it has been given something that it has not seen.
async fn woken<F: Future>(future: F, patience: Duration) -> Option<F::Output> {
    let (mut future, mut limit) = (pin!(future), pin!(sleep(patience)));
    let mut polled = false;
    poll_fn(|cx| {
        if polled {
            return Poll::Ready(None);
        }
        polled = true;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending => limit.as_mut().poll(cx).map(|()| None),
        }
    })
    .await
}
