//! Stream sockets of tasks against sockets of the standard library: receiving, sending, ends.
#![cfg(target_os = "linux")]

mod support;
mod task_common;

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::sync::mpsc;
use std::task::Poll;
use std::time::Duration;

use corelane::time::{sleep, timeout};
use corelane::{CloseReason, Payload, SendErrorKind};
use support::{connect_narrow, expect, pattern, read_to_eof, reset, same_bytes};
use task_common::*;

const SOON: Duration = Duration::from_millis(20);

#[test]
fn an_exact_receive_that_is_dropped_has_taken_nothing() {
    on_each_backend(|builder| {
        let (go, told) = mpsc::channel();
        run(builder, move || async move {
            let mut stream = accepted(move |mut peer| {
                peer.write_all(b"0123456789").expect("written");
                told.recv().expect("told");
                peer.write_all(b"abcdef").expect("written");
            })
            .await;
            let mut room = [0; 12];
            // It takes what is there and waits for the rest.
            assert!(timeout(SOON, stream.recv_exact(&mut room)).await.is_err());
            assert_eq!(&stream.peek().await.expect("peeked").expect("data")[..], b"0123456789");
            stream.recv_exact(&mut room[..4]).await.expect("there");
            assert_eq!(&room[..4], b"0123");
            assert!(timeout(SOON, stream.recv_exact(&mut room)).await.is_err());
            go.send(()).expect("the peer waits");
            stream.recv_exact(&mut room).await.expect("there now");
            assert_eq!(&room, b"456789abcdef");
            assert_eq!(stream.recv_exact(&mut room).await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
            stream.recv_exact(&mut []).await.expect("nothing is always there");
            assert!(stream.recv().await.expect("an end").is_none());
        });
    });
}

#[test]
fn what_an_exact_receive_found_before_the_end_stays_even_when_this_side_has_finished() {
    on_each_backend(|builder| {
        run(builder, || async {
            let mut stream = accepted(|mut peer| peer.write_all(b"short").expect("written")).await;
            stream.shutdown();
            let mut room = [0; 64];
            {
                // Kept beyond its end, for turns in which a connection without anything to receive would be closed.
                let mut exact = std::pin::pin!(stream.recv_exact(&mut room));
                assert_eq!(exact.as_mut().await.unwrap_err().kind(), ErrorKind::UnexpectedEof);
                sleep(SOON).await;
            }
            assert_eq!(stream.close_reason(), None);
            assert_eq!(&piece(&mut stream).await[..], b"short");
            assert!(stream.recv().await.expect("an end").is_none());
            until("the end of a connection that both sides have finished", || {
                stream.close_reason() == Some(CloseReason::Eof)
            })
            .await;
            assert!(stream.recv().await.expect("still the end").is_none());
            stream.flush().await.expect("everything was sent before both had finished");
        });
    });
}

#[test]
fn what_an_exact_receive_found_before_a_reset_stays() {
    on_each_backend(|builder| {
        let (go, told) = mpsc::channel();
        run(builder, move || async move {
            let mut stream = accepted(move |mut peer| {
                peer.write_all(b"before").expect("written");
                told.recv().expect("told");
                reset(peer);
            })
            .await;
            stream.peek().await.expect("peeked").expect("data");
            let mut room = [0; 64];
            {
                let mut exact = std::pin::pin!(stream.recv_exact(&mut room));
                assert!(poll_once(exact.as_mut()).await.is_pending());
                go.send(()).expect("the peer waits");
                assert_eq!(exact.await.unwrap_err().kind(), ErrorKind::ConnectionReset);
            }
            assert_eq!(stream.close_reason(), Some(CloseReason::Reset));
            assert_eq!(&stream.peek().await.expect("peeked").expect("data")[..], b"before");
            assert_eq!(&piece(&mut stream).await[..], b"before");
            assert_eq!(stream.recv().await.unwrap_err().kind(), ErrorKind::ConnectionReset);
            assert_eq!(stream.send("late").await.unwrap_err().kind(), ErrorKind::ConnectionReset);
            assert_eq!(stream.try_recv().unwrap_err().kind(), ErrorKind::ConnectionReset);
        });
    });
}

#[test]
fn peeking_shows_the_buffer_that_the_next_receive_gives() {
    on_each_backend(|builder| {
        run(builder, || async {
            let mut stream = accepted(|mut peer| peer.write_all(b"look").expect("written")).await;
            let seen = stream.peek().await.expect("peeked").expect("data");
            let again = stream.peek().await.expect("peeked").expect("data");
            let got = piece(&mut stream).await;
            assert_eq!(&got[..], b"look");
            assert_eq!([seen.as_ptr(), again.as_ptr()], [got.as_ptr(); 2]);
            assert!(stream.peek().await.expect("peeked").is_none(), "the end");
            assert!(stream.recv().await.expect("received").is_none(), "the end, once more");
        });
    });
}

#[test]
fn owned_reads_append_what_is_there_and_leave_the_rest() {
    on_each_backend(|builder| {
        let sent = pattern(7, 3_000_000);
        let wanted = sent.clone();
        run(builder, move || async move {
            let mut stream = accepted(move |mut peer| peer.write_all(&sent).expect("written")).await;
            let (got, buf) = stream.recv_into(Vec::new(), 0).await;
            assert_eq!((got.expect("nothing"), buf.len()), (0, 0));
            let (got, mut buf) = stream.recv_into(b"head".to_vec(), 10).await;
            assert_eq!((got.expect("some"), buf.len()), (10, 14));
            assert_eq!(&buf[..4], b"head");
            buf.drain(..4);
            loop {
                let before = buf.len();
                let (got, back) = stream.recv_into(buf, 100_000).await;
                buf = back;
                let got = got.expect("received");
                assert_eq!(buf.len(), before + got);
                assert!(got <= 100_000);
                if got == 0 {
                    break;
                }
            }
            same_bytes(&buf, &wanted, "what was received");
        });
    });
}

#[test]
fn without_waiting_there_is_data_or_it_would_block() {
    on_each_backend(|builder| {
        let (go, told) = mpsc::channel();
        run(builder, move || async move {
            let mut stream = accepted(move |mut peer| {
                told.recv().expect("told");
                peer.write_all(b"now").expect("written");
            })
            .await;
            assert_eq!(stream.try_recv().unwrap_err().kind(), ErrorKind::WouldBlock);
            assert!(poll_once(stream.recv()).await.is_pending());
            assert!(poll_once(stream.readable()).await.is_pending());
            go.send(()).expect("the peer waits");
            stream.readable().await.expect("there");
            assert_eq!(&stream.try_recv().expect("received").expect("data")[..], b"now");
            assert!(stream.recv().await.expect("received").is_none());
            assert!(stream.try_recv().expect("received").is_none(), "the end is not waited for");
        });
    });
}

#[test]
fn a_reader_who_does_not_read_holds_senders_up_and_loses_nothing() {
    on_each_backend(|builder| {
        let (go, told) = mpsc::channel::<()>();
        let (len, length) = mpsc::channel::<usize>();
        let builder = builder.worker(small());
        run(builder, move || async move {
            let mut listener = listen(move |addr| {
                let peer = connect_narrow(addr, 4096);
                told.recv().expect("told");
                let got = read_to_eof(peer);
                let sent = length.recv().expect("told");
                same_bytes(&got, &pattern(3, sent), "what was received");
            })
            .await;
            let mut stream = listener.accept().await.expect("accepted");
            let bytes = pattern(3, 64 << 20);
            let mut sent = 0;
            // As much as the kernel takes, and the high-water mark.
            loop {
                let part = bytes[sent..sent + 10_000].to_vec();
                if timeout(Duration::from_millis(300), stream.send(part)).await.is_err() {
                    break;
                }
                sent += 10_000;
            }
            let high = 16 << 10;
            assert!(stream.unsent() >= high && stream.unsent() < high + 10_000, "{}", stream.unsent());
            assert!(poll_once(stream.writable()).await.is_pending());
            assert!(poll_once(stream.flush()).await.is_pending());
            // Past the mark as far as the limit, and then the payload comes back as it was.
            let refused = loop {
                let part = bytes[sent..sent + 10_000].to_vec();
                let at = part.as_ptr();
                match stream.try_send(part) {
                    Ok(()) => sent += 10_000,
                    Err(refused) => break (refused, at),
                }
            };
            assert_eq!(refused.0.kind, SendErrorKind::Full);
            assert_eq!(refused.0.payload.as_slice().as_ptr(), refused.1);
            let next = sent;
            go.send(()).expect("the peer waits");
            stream.send_all(refused.0.payload).await.expect("sent");
            assert_eq!(stream.unsent(), 0);
            stream
                .send_vectored([bytes[next + 10_000..next + 300_000].to_vec(), Vec::new()])
                .await
                .expect("sent");
            // More pieces than the limit lets in at once.
            let pieces =
                (next + 300_000..next + 900_000).step_by(1000).map(|at| bytes[at..at + 1000].to_vec());
            stream.send_vectored(pieces).await.expect("sent");
            len.send(next + 900_000).expect("the peer waits");
            stream.flush().await.expect("sent");
            stream.shutdown();
            assert_eq!(stream.send("late").await.unwrap_err().kind(), ErrorKind::BrokenPipe);
            let refused = stream.try_send("late").unwrap_err();
            assert_eq!((refused.kind, refused.payload.as_slice()), (SendErrorKind::Closed, &b"late"[..]));
            assert!(stream.recv().await.expect("received").is_none());
        });
    });
}

#[test]
fn pieces_of_every_kind_go_out_one_behind_the_other() {
    on_each_backend(|builder| {
        run(builder, || async {
            let mut stream = accepted(|mut peer| {
                peer.write_all(b"lease").expect("written");
                expect(&mut peer, b"static|owned|shared|lease|composed|");
                assert_eq!(read_to_eof(&mut peer), b"");
            })
            .await;
            let lease = piece(&mut stream).await;
            let mut composed = corelane::net::alloc(SOON).await.expect("a buffer");
            composed.put(b"|composed|");
            let shared: std::sync::Arc<[u8]> = b"shared|"[..].into();
            let pieces: Vec<Payload> = vec![
                "static|".into(),
                b"owned|".to_vec().into(),
                shared.into(),
                lease.into(),
                composed.freeze().into(),
            ];
            stream.send_vectored(pieces).await.expect("sent");
            stream.send("").await.expect("nothing is sent at once");
            stream.send_vectored([""; 0]).await.expect("no pieces either");
            stream.flush().await.expect("sent");
            stream.shutdown();
            assert!(stream.recv().await.expect("received").is_none());
        });
    });
}

#[test]
fn an_abort_is_a_reset_for_the_peer() {
    on_each_backend(|builder| {
        let (done, told) = mpsc::channel();
        run(builder, move || async move {
            let mut stream = accepted(move |mut peer| {
                peer.write_all(b"x").expect("written");
                let error = peer.read(&mut [0; 8]).expect_err("a reset");
                done.send(error.kind()).expect("the test waits");
            })
            .await;
            piece(&mut stream).await;
            stream.abort();
            let mut kind = None;
            until("the peer's error", || {
                kind = told.try_recv().ok();
                kind.is_some()
            })
            .await;
            assert_eq!(kind, Some(ErrorKind::ConnectionReset));
        });
    });
}

#[test]
fn a_dropped_stream_sends_what_is_queued_first() {
    on_each_backend(|builder| {
        let (done, told) = mpsc::channel();
        run(builder, move || async move {
            let mut stream = accepted(move |peer| {
                done.send(read_to_eof(peer).len()).expect("the test waits");
            })
            .await;
            stream.try_send(vec![1; 1_000_000]).expect("queued");
            drop(stream);
            let mut len = None;
            until("everything", || {
                len = told.try_recv().ok();
                len.is_some()
            })
            .await;
            assert_eq!(len, Some(1_000_000));
        });
    });
}

#[test]
fn limits_end_a_connection_and_an_idle_one_only_when_its_data_was_taken() {
    on_each_backend(|builder| {
        run(builder, || async {
            let mut stream = accepted(|mut peer| {
                peer.write_all(b"unread").expect("written");
                assert_eq!(read_to_eof(peer), b"");
            })
            .await;
            stream.peek().await.expect("peeked").expect("data");
            stream.set_idle_timeout(Some(Duration::from_millis(10)));
            sleep(Duration::from_millis(60)).await;
            assert_eq!(stream.close_reason(), None, "it is this side that does not receive");
            assert_eq!(&piece(&mut stream).await[..], b"unread");
            assert_eq!(stream.recv().await.unwrap_err().kind(), ErrorKind::TimedOut);
            assert_eq!(stream.close_reason(), Some(CloseReason::IdleTimeout));

            let mut stream = accepted(|mut peer| {
                assert_eq!(peer.read(&mut [0]).expect_err("a reset").kind(), ErrorKind::ConnectionReset);
            })
            .await;
            stream.set_deadline(Some(Duration::from_millis(10)));
            assert_eq!(stream.recv().await.unwrap_err().kind(), ErrorKind::TimedOut);
            assert_eq!(stream.close_reason(), Some(CloseReason::Deadline));
            stream.set_deadline(None);
            stream.set_idle_timeout(None);
            stream.shutdown();
            assert_eq!(stream.unsent(), 0);
        });
    });
}

#[test]
fn a_task_that_never_has_to_wait_lets_others_run() {
    on_each_backend(|builder| {
        run(builder, || async {
            let mut stream = accepted(|mut peer| {
                peer.write_all(b"x").expect("written");
                peer.shutdown(Shutdown::Write).expect("ended");
                read_to_eof(peer);
            })
            .await;
            stream.peek().await.expect("peeked").expect("data");
            let ran = std::rc::Rc::new(std::cell::Cell::new(false));
            let other = ran.clone();
            drop(corelane::task::spawn(async move { other.set(true) }));
            let mut peeks = 0;
            while !ran.get() {
                stream.peek().await.expect("peeked").expect("data");
                peeks += 1;
                assert!(peeks < 100_000, "nobody else runs");
            }
        });
    });
}

#[test]
fn poll_functions_register_the_task_that_polls_last() {
    on_each_backend(|builder| {
        let (go, told) = mpsc::channel();
        run(builder, move || async move {
            let mut stream = accepted(move |mut peer| {
                told.recv().expect("told");
                peer.write_all(b"x").expect("written");
            })
            .await;
            // A waker that is nobody's is replaced by the task's own.
            let mut nobody = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(stream.poll_recv(&mut nobody).is_pending());
            assert!(matches!(stream.poll_writable(&mut nobody), Poll::Ready(Ok(()))));
            assert!(matches!(stream.poll_flush(&mut nobody), Poll::Ready(Ok(()))));
            go.send(()).expect("the peer waits");
            assert_eq!(&piece(&mut stream).await[..], b"x");
        });
    });
}
