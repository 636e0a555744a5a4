//! Listeners that tasks bind, and what connections are asked, on the real kernel.

use std::net::SocketAddr;
use std::time::Duration;

use corelane::net::{TcpListener, TcpStream};
use corelane::{Backend, Builder, Descriptors, Runtime, SocketOptions, WorkerConfig};

/// Runtimes of one worker on everything that this system has.
fn builders() -> Vec<Builder> {
    let with = |descriptors| WorkerConfig { descriptors, ..WorkerConfig::default() };
    let mut all = vec![
        Runtime::builder().worker(with(Descriptors::Direct)),
        Runtime::builder().worker(with(Descriptors::Fd)),
    ];
    if cfg!(target_os = "linux") {
        all.push(Runtime::builder().backend(Backend::Epoll));
    }
    all
}

/// Bound and dropped for ever: each listener has its own clients, at its own address.
async fn come_and_go() -> std::io::Result<()> {
    for round in 0..400 {
        let mut listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let mut there = TcpStream::connect(addr).await?;
        let mut here = listener.accept().await?;
        if round % 2 == 0 {
            // With accepts armed, or with a client in its queue that nobody accepts.
            drop(TcpStream::connect(addr).await?);
        }
        drop(listener);
        assert_eq!((here.local_addr().await?, there.peer_addr().await?), (addr, addr));
        assert_eq!(here.peer_addr().await?, there.local_addr().await?);
        here.set_options(&SocketOptions { nodelay: false, ..SocketOptions::default() }).await?;
        there.send(format!("round {round}").into_bytes()).await?;
        let data = here.recv().await?.expect("data");
        assert_eq!(&data[..], format!("round {round}").as_bytes());
    }
    Ok(())
}

#[test]
fn listeners_come_and_go_and_connections_know_their_addresses() {
    for builder in builders() {
        builder.block_on(Duration::from_secs(10), come_and_go()).expect("started").expect("every round");
    }
}

#[test]
fn an_address_in_use_is_told_to_who_asked() {
    for builder in builders() {
        let outcome = builder.block_on(Duration::from_secs(10), async {
            let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
            let addr: SocketAddr = taken.local_addr()?;
            let error = TcpListener::bind(addr).await.expect_err("taken");
            assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse, "{error}");
            drop(taken);
            TcpListener::bind(addr).await.map(drop)
        });
        outcome.expect("started").expect("free again");
    }
}
