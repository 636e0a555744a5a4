//! smol: `Async` sockets and tasks on a `LocalExecutor` that the main thread runs.
//!
//! `block_on` polls the reactor on the thread that it blocks; smol's helper thread (`async-io`) sleeps meanwhile.

use std::io;
use std::rc::Rc;

use peer::{BUFFER, Backend, Options, announce};
use smol::io::{AsyncReadExt, AsyncWriteExt};
use smol::net::{TcpListener, TcpStream};
use smol::{Async, LocalExecutor};

fn main() -> io::Result<()> {
    let options = Options::parse();
    let executor = Rc::new(LocalExecutor::new());
    smol::block_on(executor.run(async {
        let listener = TcpListener::from(Async::new(options.listener())?);
        announce(listener.local_addr()?, "smol", Backend::Epoll, "async-io on polling");
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    stream.set_nodelay(true)?;
                    if options.discard {
                        executor.spawn(discard(stream)).detach();
                    } else {
                        executor.spawn(echo(stream)).detach();
                    }
                }
                Err(error) => eprintln!("accept: {error}"),
            }
        }
    }))
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
