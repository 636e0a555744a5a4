//! `bytes::Bytes` as what is sent (feature `bytes`): the same memory goes to the kernel, and is let go of afterwards.
#![cfg(all(target_os = "linux", feature = "bytes"))]

mod support;
mod task_common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use bytes::Bytes;
use corelane::Payload;
use support::{read_to_eof, same_bytes};
use task_common::*;

/// Bytes that count how often they are let go of.
struct Owner(Vec<u8>, Arc<AtomicUsize>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn bytes_are_sent_from_where_they_are_and_let_go_of_when_the_kernel_has_them() {
    on_each_backend(|builder| {
        run(builder, || async {
            let content = support::pattern(4, 500_000);
            let wanted = content.repeat(2);
            let (go, told) = mpsc::channel::<()>();
            let mut stream = accepted(move |peer| {
                told.recv().expect("told");
                same_bytes(&read_to_eof(peer), &wanted, "what was received");
            })
            .await;
            let dropped = Arc::new(AtomicUsize::new(0));
            let bytes = Bytes::from_owner(Owner(content, dropped.clone()));
            let payload = Payload::from(bytes.clone());
            assert_eq!(payload.as_slice().as_ptr(), bytes.as_ptr(), "not a copy");
            stream.send(payload).await.expect("sent");
            stream
                .send_vectored([bytes.slice(..200_000), bytes.slice(200_000..), Bytes::new()])
                .await
                .expect("sent");
            drop(bytes);
            go.send(()).expect("the peer waits");
            stream.flush().await.expect("sent");
            assert_eq!(dropped.load(Ordering::SeqCst), 1);
            stream.shutdown();
            assert!(stream.recv().await.expect("received").is_none());
        });
    });
}

/// Asks for the worker's time when it is dropped, which only a task can.
struct Asks;

impl AsRef<[u8]> for Asks {
    fn as_ref(&self) -> &[u8] {
        b""
    }
}

impl Drop for Asks {
    fn drop(&mut self) {
        drop(corelane::time::sleep(std::time::Duration::ZERO));
    }
}

#[test]
fn bytes_whose_owner_does_something_when_dropped_may_be_empty() {
    on_each_backend(|builder| {
        run(builder, || async {
            let mut stream = accepted(|peer| assert_eq!(read_to_eof(peer), b"")).await;
            stream.try_send(Bytes::from_owner(Asks)).expect("nothing to send");
            stream.send(Bytes::from_owner(Asks)).await.expect("nothing to send");
            stream.shutdown();
            let refused = stream.try_send(Bytes::from_owner(Asks)).expect_err("it was shut down");
            assert!(refused.payload.is_empty());
        });
    });
}
