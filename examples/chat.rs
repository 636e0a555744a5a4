//! A chat for `nc`: what one says, all others on all workers read, under the name that the first line gave.
//!
//! `cargo run --release --example chat -- 127.0.0.1:7000`

use corelane::net::{TcpListener, TcpStream};
use corelane::sync::Broadcast;
use corelane::{Runtime, Server, Signals};
use std::{error::Error, io, net::SocketAddr, time::Duration};

/// The next line, without its end; `None` when the client has left.
async fn line(stream: &mut TcpStream, read: &mut Vec<u8>) -> io::Result<Option<String>> {
    loop {
        if let Some(end) = read.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = read.drain(..=end).collect();
            return Ok(Some(String::from_utf8_lossy(&line).trim_end().to_owned()));
        }
        if read.len() > 1000 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a line of more than 1000 bytes"));
        }
        let Some(data) = stream.recv().await? else { return Ok(None) };
        read.extend_from_slice(&data);
    }
}

async fn chat(mut stream: TcpStream, room: Broadcast) -> io::Result<()> {
    let mut read = Vec::new();
    stream.send("your name? ").await?;
    let Some(name) = line(&mut stream, &mut read).await? else { return Ok(()) };
    let member = room.join(stream.id());
    room.send(format!("* {name} has come\n"));
    while let Some(said) = line(&mut stream, &mut read).await? {
        room.send_except(&member, format!("{name}: {said}\n"));
        if member.missed() > 0 {
            // Behind by more than the limit: a chat with holes is none.
            stream.abort();
            break;
        }
    }
    drop(member);
    room.send(format!("* {name} has left\n"));
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let signals = Signals::block()?;
    let addr: SocketAddr = std::env::args().nth(1).as_deref().unwrap_or("127.0.0.1:7000").parse()?;
    let room = Broadcast::with_limit(256 << 10);
    let runtime = Runtime::builder().listen(addr).start_tasks(move |_| async move {
        let server = Server::new().on_failure(|failure| eprintln!("{failure}"));
        let report = server.serve(TcpListener::of_builder(0), move |stream| chat(stream, room)).await?;
        println!("{report}");
        Ok::<(), corelane::ServeError>(())
    })?;
    println!("listening on {}", runtime.info().listeners[0].addr);
    println!("{}", runtime.run_until(&signals, Duration::from_secs(5))?);
    Ok(())
}
