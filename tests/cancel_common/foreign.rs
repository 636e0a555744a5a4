//! Peers that are not corelane: threads on blocking sockets of the standard library.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::unix::net::UnixStream as StdUnix;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use super::support::{PATIENCE, Rng, connect, pattern, same_bytes};

/// Sends in pieces of any size while reading; what was read, and whether everything could be sent.
pub fn converse<S: Read + Write + Send + Finish>(
    mut from: S,
    mut to: S,
    bytes: &[u8],
    seed: u64,
) -> (Vec<u8>, io::Result<()>) {
    let mut rng = Rng::new(seed ^ 0xabcd);
    let mut got = Vec::new();
    std::thread::scope(|scope| {
        let sending = scope.spawn(move || {
            let mut rest = bytes;
            while !rest.is_empty() {
                let (piece, behind) = rest.split_at(rng.within(1, 9_000).min(rest.len()));
                to.write_all(piece)?;
                if rng.one_in(4) {
                    std::thread::yield_now();
                }
                rest = behind;
            }
            to.finish()
        });
        let read = from.read_to_end(&mut got);
        let sent = sending.join().expect("no panic");
        (got, read.map(drop).and(sent))
    })
}

/// [`converse`] with one who sends back what he gets.
pub fn exchange<S: Read + Write + Send + Finish>(from: S, to: S, seed: u64) {
    let bytes = pattern(seed, Rng::new(seed ^ 0x1234).within(1, 120_000));
    let (got, outcome) = converse(from, to, &bytes, seed);
    outcome.expect("sent everything, and read to the end");
    same_bytes(&got, &bytes, &format!("seed {seed}"));
}

/// Says that nothing more will be sent.
pub trait Finish {
    fn finish(&self) -> io::Result<()>;
}

impl Finish for std::net::TcpStream {
    fn finish(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

impl Finish for StdUnix {
    fn finish(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

pub fn tcp_peer(addr: SocketAddr, seed: u64) {
    let to = connect(addr);
    exchange(to.try_clone().expect("cloned"), to, seed);
}

pub fn unix_peer(path: &Path, seed: u64) {
    let to = StdUnix::connect(path).expect("connected");
    to.set_read_timeout(Some(PATIENCE)).expect("set");
    exchange(to.try_clone().expect("cloned"), to, seed);
}

/// An echo server of the standard library: as many connections as come, until `over` says so.
pub fn std_echo<S: Read + Write + Send + 'static>(
    mut accept: impl FnMut() -> io::Result<S>,
    over: mpsc::Receiver<()>,
) {
    let mut threads = Vec::new();
    while over.try_recv() != Err(mpsc::TryRecvError::Disconnected) {
        match accept() {
            Ok(mut stream) => threads.push(std::thread::spawn(move || {
                let mut room = [0; 3_000];
                // An attempt that was given up is reset or closed.
                while let Ok(n) = stream.read(&mut room) {
                    if n == 0 || stream.write_all(&room[..n]).is_err() {
                        break;
                    }
                }
            })),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                std::thread::park_timeout(Duration::from_millis(1));
            }
        }
    }
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
}
