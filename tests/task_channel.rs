//! The channels that are re-exported, with the wakers of this runtime: between workers, and from foreign threads.
#![cfg(target_os = "linux")]

use std::time::Duration;

use corelane::sync::channel;
use corelane::task::{self, Message, block_on, consume_budget, spawn, yield_now};
use corelane::time::timeout;
use corelane::{Runtime, WorkerConfig};

/// No test waits longer than this for any one thing.
const PATIENCE: Duration = Duration::from_secs(30);

const PRODUCERS: u64 = 4;
const MESSAGES: u64 = 100_000;
/// Where every message is a change of threads.
const FEW: u64 = 2_000;

/// What arrives, checked: every producer's messages in their order, none missing, none twice.
async fn take_all(from: channel::Receiver<(u64, u64)>, messages: u64) -> u64 {
    let mut next = [0; PRODUCERS as usize];
    // By number, not to the end of the channel: a runtime keeps what it makes its tasks with, senders too.
    for _ in 0..PRODUCERS * messages {
        let (producer, message) = from.recv().await.expect("not all have been sent");
        assert_eq!(message, next[producer as usize], "of producer {producer}");
        next[producer as usize] += 1;
        consume_budget().await;
    }
    assert_eq!(next, [messages; PRODUCERS as usize]);
    next.iter().sum()
}

/// A runtime whose worker 0 consumes and tells what it counted; the others do what `make` says.
fn consumer<F, M>(
    workers: usize,
    config: WorkerConfig,
    from: channel::Receiver<(u64, u64)>,
    messages: u64,
    make: M,
) -> (Runtime<Message>, std::sync::mpsc::Receiver<u64>)
where
    M: Fn(usize) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = ()> + 'static,
{
    let (to, counted) = std::sync::mpsc::channel();
    let started = Runtime::builder().workers(workers).worker(config).start_tasks(move |index| {
        let (from, to, make) = (from.clone(), to.clone(), make.clone());
        async move {
            if index == 0 {
                to.send(take_all(from, messages).await).expect("the test waits");
            } else {
                drop(from);
                make(index).await;
            }
        }
    });
    (started.expect("started"), counted)
}

#[test]
fn four_foreign_threads_lose_nothing_to_a_worker() {
    for (capacity, messages) in [(1, FEW), (64, MESSAGES)] {
        let (to, from) = channel::bounded(capacity);
        let (runtime, counted) = consumer(1, WorkerConfig::default(), from, messages, |_| async {});
        let producers: Vec<_> = (0..PRODUCERS)
            .map(|producer| {
                let to = to.clone();
                std::thread::spawn(move || {
                    for message in 0..messages {
                        to.send_blocking((producer, message)).expect("somebody receives");
                    }
                })
            })
            .collect();
        drop(to);
        assert_eq!(counted.recv_timeout(PATIENCE * 4), Ok(PRODUCERS * messages));
        for producer in producers {
            producer.join().expect("it sent all");
        }
        runtime.shutdown(PATIENCE).expect("a report");
    }
}

#[test]
fn four_workers_lose_nothing_to_a_fifth_even_with_a_tiny_mailbox() {
    for (capacity, mailbox, messages) in [(1, 1, FEW), (16, 1, MESSAGES), (1024, 64, MESSAGES)] {
        let (to, from) = channel::bounded(capacity);
        let config = WorkerConfig { mailbox, ..WorkerConfig::default() };
        let (runtime, counted) = consumer(1 + PRODUCERS as usize, config, from, messages, move |index| {
            let to = to.clone();
            async move {
                for message in 0..messages {
                    to.send((index as u64 - 1, message)).await.expect("somebody receives");
                }
            }
        });
        assert_eq!(counted.recv_timeout(PATIENCE * 4), Ok(PRODUCERS * messages));
        runtime.shutdown(PATIENCE).expect("a report");
    }
}

#[test]
fn a_full_channel_holds_the_sender_back_until_something_is_taken() {
    let (to, from) = channel::bounded(2);
    let sent = block_on(async move {
        let sending = spawn(async move {
            for n in 0..10 {
                to.send(n).await.expect("somebody receives");
            }
        });
        yield_now().await;
        yield_now().await;
        assert_eq!(from.len(), 2);
        assert!(!sending.is_finished());
        let mut got = Vec::new();
        while let Ok(n) = from.recv().await {
            assert!(from.len() <= 2);
            got.push(n);
        }
        sending.await.expect("no task panics");
        got
    });
    assert_eq!(sent.expect("run"), (0..10).collect::<Vec<_>>());
}

#[test]
fn the_end_of_either_side_is_told_to_the_other() {
    let (to, from) = channel::bounded::<u8>(1);
    // The receiver goes, from another thread, while a task waits to send.
    let error = block_on(async move {
        to.send(1).await.expect("there is room");
        let going = std::thread::spawn(move || {
            std::thread::yield_now();
            drop(from);
        });
        let error = to.send(2).await.expect_err("nobody receives");
        going.join().expect("it went");
        error.into_inner()
    });
    assert_eq!(error.expect("run"), 2);

    // The sender goes while a task waits to receive; what it sent before still comes.
    let (to, from) = channel::bounded::<u8>(1);
    let got = block_on(async move {
        let going = std::thread::spawn(move || to.send_blocking(3).expect("somebody receives"));
        let got = (from.recv().await, from.recv().await);
        going.join().expect("it went");
        got
    });
    assert_eq!(got.expect("run"), (Ok(3), Err(channel::RecvError)));
}

#[test]
fn a_receive_that_is_given_up_loses_no_message() {
    let (to, from) = channel::bounded(1);
    let sending = std::thread::spawn(move || {
        for n in 0..2000u32 {
            to.send_blocking(n).expect("somebody receives");
        }
    });
    let got = block_on(async move {
        let mut got = Vec::new();
        loop {
            match timeout(Duration::ZERO, from.recv()).await {
                Ok(Ok(n)) => got.push(n),
                Ok(Err(_)) => return got,
                Err(_) => yield_now().await,
            }
        }
    });
    sending.join().expect("it sent all");
    assert_eq!(got.expect("run"), (0..2000).collect::<Vec<_>>());
}

#[test]
fn a_receiver_that_never_waits_lets_others_run() {
    let (to, from) = channel::unbounded();
    for n in 0..1000u32 {
        to.try_send(n).expect("there is always room");
    }
    drop(to);
    let turns = block_on(async move {
        let others = spawn(async {
            let mut turns = 0;
            for _ in 0..5 {
                turns += 1;
                yield_now().await;
            }
            turns
        });
        while from.recv().await.is_ok() {
            consume_budget().await;
        }
        assert!(others.is_finished(), "1000 messages are more than five turns");
        let _ = task::workers();
        others.await.expect("no task panics")
    });
    assert_eq!(turns.expect("run"), 5);
}
