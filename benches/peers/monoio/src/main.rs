//! monoio on its io_uring driver: owned buffers, a task for each connection.

use std::io;

use monoio::io::{AsyncReadRent, AsyncWriteRentExt};
use monoio::net::{TcpListener, TcpStream};
use peer::{BUFFER, Backend, Options, announce};

fn main() -> io::Result<()> {
    let options = Options::parse();
    // `RuntimeBuilder<FusionDriver>` would choose by itself; named, it cannot fall back to epoll unseen.
    let mut builder = monoio::RuntimeBuilder::<monoio::IoUringDriver>::new();
    if let Some(entries) = options.extra("entries") {
        builder = builder.with_entries(entries.parse().expect("--entries N"));
    }
    let mut runtime = builder.build()?;
    runtime.block_on(async move {
        let listener = TcpListener::from_std(options.listener())?;
        announce(listener.local_addr()?, "monoio", Backend::IoUring, "IoUringDriver");
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    stream.set_nodelay(true)?;
                    if options.discard {
                        monoio::spawn(discard(stream));
                    } else {
                        monoio::spawn(echo(stream));
                    }
                }
                Err(error) => eprintln!("accept: {error}"),
            }
        }
    })
}

async fn echo(mut stream: TcpStream) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        let (length, filled) = stream.read(buffer).await;
        if length? == 0 {
            return Ok(());
        }
        let (written, back) = stream.write_all(filled).await;
        written?;
        buffer = back;
        buffer.clear();
    }
}

async fn discard(mut stream: TcpStream) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        let (length, filled) = stream.read(buffer).await;
        if length? == 0 {
            return Ok(());
        }
        buffer = filled;
        buffer.clear();
    }
}
