//! tokio, the idiomatic way: a task for each connection, `read` into the task's own buffer, `write_all` of it.
//!
//! `--flavor current` (default) is the current-thread runtime, which a server that is one thread per core uses;
//! `--flavor multi` is the work-stealing one, here with one worker thread.

use std::io;

use peer::{BUFFER, Backend, Options, announce};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

fn main() -> io::Result<()> {
    let options = Options::parse();
    let (flavor, runtime) = match options.extra("flavor") {
        None | Some("current") => {
            ("current_thread", tokio::runtime::Builder::new_current_thread().enable_io().build()?)
        }
        Some("multi") => (
            "multi_thread",
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(options.workers)
                .enable_io()
                .build()?,
        ),
        Some(other) => panic!("--flavor {other}: expected current or multi"),
    };
    runtime.block_on(async move {
        let listener = options.listener();
        // In a task, so that with the multi-thread runtime a worker accepts and not the thread that blocks on it.
        let accepting = tokio::spawn(async move {
            let listener = TcpListener::from_std(listener)?;
            announce(listener.local_addr()?, "tokio", Backend::Epoll, flavor);
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        stream.set_nodelay(true)?;
                        if options.discard {
                            tokio::spawn(discard(stream));
                        } else {
                            tokio::spawn(echo(stream));
                        }
                    }
                    Err(error) => eprintln!("accept: {error}"),
                }
            }
        });
        accepting.await?
    })
}

async fn echo(mut stream: TcpStream) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let length = stream.read(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        stream.write_all(&buffer[..length]).await?;
    }
}

async fn discard(mut stream: TcpStream) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    while stream.read(&mut buffer).await? > 0 {}
    Ok(())
}
