//! Streams of tasks on the real kernel: echo, ends, and the stop.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream as Std};
use std::time::Duration;

use corelane::net::{TcpListener, TcpStream};
use corelane::task::{self, Message};
use corelane::{Builder, Runtime};

async fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    while let Some(data) = stream.recv().await? {
        stream.send(data).await?;
    }
    Ok(())
}

async fn serve(mut listener: TcpListener) {
    while let Ok(stream) = listener.accept().await {
        drop(task::spawn(echo(stream)));
    }
}

fn server(builder: Builder) -> (Runtime<Message>, SocketAddr) {
    let addr: SocketAddr = "127.0.0.1:0".parse().expect("an address");
    let started = builder.listen(addr).start_tasks(|_| async {
        serve(TcpListener::of_builder(0).expect("it was given one")).await;
    });
    let runtime = started.expect("started");
    let addr = runtime.info().listeners[0].addr;
    (runtime, addr)
}

#[test]
fn what_is_sent_comes_back_and_a_half_close_ends_it() {
    let (runtime, addr) = server(Runtime::builder().workers(2));
    let sent: Vec<u8> = (0..2_000_000u32).map(|n| ((n * 31) >> 3) as u8).collect();
    let mut clients: Vec<Std> = (0..8).map(|_| Std::connect(addr).expect("connected")).collect();
    for client in &mut clients {
        let mut writer = client.try_clone().expect("cloned");
        let bytes = sent.clone();
        let writing = std::thread::spawn(move || {
            writer.write_all(&bytes).expect("written");
            writer.shutdown(Shutdown::Write).expect("ended");
        });
        let mut got = Vec::new();
        client.read_to_end(&mut got).expect("read");
        assert!(got == sent, "{} bytes came back of {}", got.len(), sent.len());
        writing.join().expect("the writer");
    }
    drop(clients);
    let report = runtime.shutdown(Duration::from_secs(5)).expect("a report");
    assert_eq!((report.aborted, report.ops_in_kernel, report.buffers_outstanding), (0, 0, 0), "{report}");
}

#[test]
fn a_stop_ends_idle_connections_in_good_order_at_once() {
    let (runtime, addr) = server(Runtime::builder());
    let mut clients: Vec<Std> = (0..50).map(|_| Std::connect(addr).expect("connected")).collect();
    for client in &mut clients {
        client.write_all(b"x").expect("written");
        client.read_exact(&mut [0]).expect("echo");
    }
    let stopping = std::thread::spawn(move || runtime.shutdown(Duration::from_secs(30)).expect("a report"));
    for client in &mut clients {
        assert_eq!(client.read(&mut [0]).expect("no reset"), 0);
    }
    drop(clients);
    let report = stopping.join().expect("the stop");
    assert_eq!((report.finished, report.aborted, report.buffers_outstanding), (50, 0, 0), "{report}");
}

#[test]
fn a_main_future_that_fails_is_reported_with_its_error() {
    let started = Runtime::builder()
        .workers(2)
        .start_tasks(|index| async move { if index == 1 { Err("no such thing") } else { Ok(()) } });
    let error = started.expect("started").join().expect_err("it failed").to_string();
    assert!(error.contains("no such thing"), "{error}");
}
