//! A TCP proxy of tasks: what one side sends goes to the other in the buffer that it arrived in, half-closes included.
//!
//! `cargo run --release --example proxy_tasks -- 127.0.0.1:7001 127.0.0.1:7000`

use corelane::net::{OwnedReadHalf, OwnedWriteHalf, TcpListener, TcpStream};
use corelane::{Runtime, ServeError, Server, Signals};
use std::{error::Error, io, net::SocketAddr, time::Duration};

/// One direction. A side that does not read holds the other one back; dropping `to` passes the end on.
async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> io::Result<()> {
    while let Some(data) = from.recv().await? {
        to.send(data).await?;
    }
    Ok(())
}

async fn proxy(client: TcpStream, target: SocketAddr) -> io::Result<()> {
    let (from_target, to_target) = TcpStream::connect(target).await?.into_split();
    let (from_client, to_client) = client.into_split();
    let up = corelane::task::spawn(pump(from_client, to_target));
    let down = pump(from_target, to_client).await;
    if down.is_err() {
        up.abort();
        return down;
    }
    up.await.map_err(|error| io::Error::other(error.to_string()))?
}

fn main() -> Result<(), Box<dyn Error>> {
    let signals = Signals::block()?;
    let mut args = std::env::args().skip(1);
    let addr: SocketAddr = args.next().as_deref().unwrap_or("127.0.0.1:7001").parse()?;
    let target: SocketAddr = args.next().as_deref().unwrap_or("127.0.0.1:7000").parse()?;
    let runtime = Runtime::builder().listen(addr).start_tasks(move |_| async move {
        let server = Server::new().max_connections(8000).on_failure(|failure| eprintln!("{failure}"));
        let report = server.serve(TcpListener::of_builder(0), move |client| proxy(client, target)).await?;
        println!("{report}");
        Ok::<(), ServeError>(())
    })?;
    println!("listening on {}", runtime.info().listeners[0].addr);
    println!("{}", runtime.run_until(&signals, Duration::from_secs(5))?);
    Ok(())
}
