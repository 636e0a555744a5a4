//! mio, no runtime: one edge-triggered epoll loop, one read buffer for all connections. What a peer does not take at once
//! is kept for that connection, which is not read from meanwhile.

use std::io::{self, ErrorKind, Read, Write};

use mio::event::Event;
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Registry, Token};
use peer::{BUFFER, Backend, MAX_CONNECTIONS, Options, announce};

/// How often a connection is read in a row.
const STAY: usize = 32;

const LISTENER: Token = Token(usize::MAX);

struct Connection {
    stream: TcpStream,
    /// What the peer has not taken yet; empty nearly always, and it then holds no memory.
    unsent: Vec<u8>,
    /// More may be readable than was read: edges come once.
    readable: bool,
    /// The peer has sent its end, which is still to be read.
    ended: bool,
}

/// What is to become of a connection.
#[derive(PartialEq, Eq)]
enum Next {
    Wait,
    /// Others had better have their turn.
    Again,
    Close,
}

fn main() -> io::Result<()> {
    let options = Options::parse();
    let mut poll = Poll::new()?;
    let mut events = Events::with_capacity(1024);
    let mut listener = TcpListener::from_std(options.listener());
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
    announce(listener.local_addr()?, "mio", Backend::Epoll, "edge-triggered");

    let mut buffer = vec![0; BUFFER];
    let mut connections: Vec<Option<Connection>> = Vec::with_capacity(MAX_CONNECTIONS);
    let mut free: Vec<usize> = Vec::new();
    let mut again: Vec<usize> = Vec::new();
    let mut turn: Vec<usize> = Vec::new();
    loop {
        let wait = if again.is_empty() { None } else { Some(std::time::Duration::ZERO) };
        match poll.poll(&mut events, wait) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            other => other?,
        }
        std::mem::swap(&mut again, &mut turn);
        for event in &events {
            if event.token() == LISTENER {
                accept(&listener, poll.registry(), &mut connections, &mut free);
                continue;
            }
            let Token(index) = event.token();
            let Some(connection) = &mut connections[index] else { continue };
            let waits = connection.readable && connection.unsent.is_empty();
            note(connection, event);
            // One that waits for its turn is in `turn` already.
            if !waits {
                turn.push(index);
            }
        }
        for index in turn.drain(..) {
            let Some(connection) = &mut connections[index] else { continue };
            let next = if options.discard {
                discard(connection, &mut buffer)
            } else {
                echo(connection, &mut buffer)
            };
            match next {
                Next::Wait => {}
                Next::Again => again.push(index),
                Next::Close => {
                    connections[index] = None;
                    free.push(index);
                }
            }
        }
    }
}

fn accept(
    listener: &TcpListener,
    registry: &Registry,
    connections: &mut Vec<Option<Connection>>,
    free: &mut Vec<usize>,
) {
    loop {
        match listener.accept() {
            Ok((mut stream, _)) => {
                let index = free.pop().unwrap_or_else(|| {
                    connections.push(None);
                    connections.len() - 1
                });
                let _ = stream.set_nodelay(true);
                if registry
                    .register(&mut stream, Token(index), Interest::READABLE | Interest::WRITABLE)
                    .is_err()
                {
                    free.push(index);
                    continue;
                }
                connections[index] =
                    Some(Connection { stream, unsent: Vec::new(), readable: false, ended: false });
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => {
                eprintln!("accept: {error}");
                return;
            }
        }
    }
}

fn note(connection: &mut Connection, event: &Event) {
    connection.ended |= event.is_read_closed() || event.is_error();
    connection.readable |= event.is_readable() || connection.ended;
}

/// Sends what is left over, then reads and answers until there is no more, or others had better have their turn: while
/// bulk flows, staying with a connection keeps its data in the cache.
fn echo(connection: &mut Connection, buffer: &mut [u8]) -> Next {
    for _ in 0..STAY {
        match echo_once(connection, buffer) {
            Next::Again => {}
            other => return other,
        }
    }
    Next::Again
}

fn echo_once(connection: &mut Connection, buffer: &mut [u8]) -> Next {
    if !connection.unsent.is_empty() {
        match write(&mut connection.stream, &connection.unsent) {
            Ok(sent) if sent == connection.unsent.len() => connection.unsent = Vec::new(),
            Ok(sent) => {
                connection.unsent.drain(..sent);
                return Next::Wait;
            }
            Err(_) => return Next::Close,
        }
    }
    if !connection.readable {
        return Next::Wait;
    }
    match connection.stream.read(buffer) {
        Ok(0) => Next::Close,
        Ok(length) => {
            // A short read means that there was no more: what comes later has an edge of its own.
            connection.readable = length == buffer.len() || connection.ended;
            match write(&mut connection.stream, &buffer[..length]) {
                Ok(sent) if sent == length => {
                    if connection.readable {
                        Next::Again
                    } else {
                        Next::Wait
                    }
                }
                Ok(sent) => {
                    connection.unsent.extend_from_slice(&buffer[sent..length]);
                    Next::Wait
                }
                Err(_) => Next::Close,
            }
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            connection.readable = false;
            Next::Wait
        }
        Err(error) if error.kind() == ErrorKind::Interrupted => Next::Again,
        Err(_) => Next::Close,
    }
}

/// Writes as much as the socket takes.
fn write(stream: &mut TcpStream, data: &[u8]) -> io::Result<usize> {
    let mut sent = 0;
    while sent < data.len() {
        match stream.write(&data[sent..]) {
            Ok(length) => sent += length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(sent)
}

fn discard(connection: &mut Connection, buffer: &mut [u8]) -> Next {
    if !connection.readable {
        return Next::Wait;
    }
    match connection.stream.read(buffer) {
        Ok(0) => Next::Close,
        Ok(length) => {
            connection.readable = length == buffer.len() || connection.ended;
            if connection.readable { Next::Again } else { Next::Wait }
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            connection.readable = false;
            Next::Wait
        }
        Err(error) if error.kind() == ErrorKind::Interrupted => Next::Again,
        Err(_) => Next::Close,
    }
}
