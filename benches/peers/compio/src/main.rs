//! compio on its io_uring driver: owned buffers, a task for each connection.

use std::io;

use compio::BufResult;
use compio::driver::{DriverType, ProactorBuilder};
use compio::io::{AsyncRead, AsyncWriteExt};
use compio::net::{TcpListener, TcpStream};
use compio::runtime::RuntimeBuilder;
use peer::{BUFFER, Backend, Options, announce};

fn main() -> io::Result<()> {
    let options = Options::parse();
    let mut proactor = ProactorBuilder::new();
    proactor.driver_type(DriverType::IoUring);
    if options.extra("taskrun") == Some("defer") {
        // Off by default in compio.
        proactor.single_issuer(true).defer_taskrun(true);
    }
    let runtime = RuntimeBuilder::new().with_proactor(proactor).build()?;
    let driver = format!("{:?}", runtime.driver_type());
    runtime.block_on(async move {
        let listener = TcpListener::from_std(options.listener())?;
        announce(listener.local_addr()?, "compio", Backend::IoUring, &driver);
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    stream.set_nodelay(true)?;
                    if options.discard {
                        compio::runtime::spawn(discard(stream)).detach();
                    } else {
                        compio::runtime::spawn(echo(stream)).detach();
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
        let BufResult(length, filled) = stream.read(buffer).await;
        if length? == 0 {
            return Ok(());
        }
        let BufResult(written, back) = stream.write_all(filled).await;
        written?;
        buffer = back;
        buffer.clear();
    }
}

async fn discard(mut stream: TcpStream) -> io::Result<()> {
    let mut buffer = Vec::with_capacity(BUFFER);
    loop {
        let BufResult(length, filled) = stream.read(buffer).await;
        if length? == 0 {
            return Ok(());
        }
        buffer = filled;
        buffer.clear();
    }
}
