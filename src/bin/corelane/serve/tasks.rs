//! The same servers as async code: a task for each connection.

use std::io;

use corelane::net::{TcpListener, TcpStream};
use corelane::{CloseReason, task};

use super::Kind;
use super::handlers::{Line, PONG, PONGS};

/// Serves every listener of this worker until the runtime stops.
pub async fn serve(kind: Kind, max_line: u32) -> io::Result<()> {
    let listeners = (0..).map_while(TcpListener::of_builder);
    let accepting: Vec<_> = listeners.map(|listener| task::spawn(accept(listener, kind, max_line))).collect();
    for loops in accepting {
        loops.await.map_err(io::Error::other)?;
    }
    Ok(())
}

async fn accept(mut listener: TcpListener, kind: Kind, max_line: u32) {
    // An error is the runtime's stop.
    while let Ok(stream) = listener.accept().await {
        // How a connection ended is counted by the runtime; there is nobody else to tell.
        drop(match kind {
            Kind::Echo => task::spawn(echo(stream)),
            Kind::Discard => task::spawn(discard(stream)),
            Kind::Heartbeat => task::spawn(heartbeat(stream, max_line)),
        });
    }
}

async fn echo(mut stream: TcpStream) -> io::Result<()> {
    while let Some(data) = stream.recv().await? {
        stream.send(data).await?;
    }
    Ok(())
}

async fn discard(mut stream: TcpStream) -> io::Result<()> {
    while stream.recv().await?.is_some() {}
    Ok(())
}

async fn heartbeat(mut stream: TcpStream, max_line: u32) -> io::Result<()> {
    let mut line = Line::default();
    while let Some(data) = stream.recv().await? {
        let verdict = line.read(&data, max_line);
        // What is answered is not a part of it.
        drop(data);
        let mut pings = verdict.pings();
        while pings > 0 {
            let now = pings.min(PONGS.len() / PONG.len());
            stream.send(&PONGS[..now * PONG.len()]).await?;
            pings -= now;
        }
        if let Some(complaint) = verdict.complaint() {
            stream.send(complaint).await?;
            stream.close_with(CloseReason::Limit);
            return Ok(());
        }
    }
    Ok(())
}
