//! glommio: one executor, pinned, a local task for each connection. Its sockets read by readiness on the ring.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};

use futures_lite::{AsyncReadExt, AsyncWriteExt};
use glommio::net::{TcpListener, TcpStream};
use glommio::{LocalExecutorBuilder, Placement};
use peer::{BUFFER, Backend, Options, announce};

fn main() {
    let options = Options::parse();
    let placement = options.cpu.map_or(Placement::Unbound, Placement::Fixed);
    let executor = LocalExecutorBuilder::new(placement).make().expect("a glommio executor");
    executor.run(async move {
        let listening = options.listener();
        let addr = listening.local_addr().expect("the address");
        // glommio tries a plain accept first and waits on the ring when there is nobody.
        // SAFETY: the descriptor is open, and given away here.
        let listener = unsafe { TcpListener::from_raw_fd(listening.into_raw_fd()) };
        announce(addr, "glommio", Backend::IoUring, "main, latency and poll rings");
        loop {
            match listener.accept().await {
                Ok(stream) => {
                    let _ = stream.set_nodelay(true);
                    debug_assert!(stream.as_raw_fd() >= 0);
                    if options.discard {
                        glommio::spawn_local(discard(stream)).detach();
                    } else {
                        glommio::spawn_local(echo(stream)).detach();
                    }
                }
                Err(error) => eprintln!("accept: {error}"),
            }
        }
    });
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
