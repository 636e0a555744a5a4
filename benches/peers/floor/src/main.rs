//! The floor: what one io_uring loop costs that does nothing but echo. Written by hand against the ring, no runtime, no
//! tasks, no timers, no metrics; what a runtime costs is the distance to it.
//!
//! One multishot accept; one multishot receive for each connection, out of one shared ring of 4 MiB of buffers; a
//! received buffer is itself sent, and goes back to the ring when the send is done. A connection has one send on its way
//! at a time (two would not be ordered), what arrives meanwhile queues. All that a turn of the loop asks for goes to the
//! kernel in the one system call that also waits.
//!
//! Back-pressure, without which bulk traffic empties the ring and spins: who has many pieces queued has its receive
//! cancelled until they are sent; who found no buffer is armed again when there are some.
//!
//! `--buffers incremental`: 16 buffers of 256 KiB that the kernel fills piece by piece (Linux 6.12), so that pieces
//! that follow each other in memory go out as one send.
//!
//! It is no server to put anywhere: a few peers that never read can hold all buffers and stop everybody else.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::types::{BufRingEntry, Fd, Fixed};
use io_uring::{IoUring, SubmissionQueue, Submitter, cqueue, opcode, squeue};
use peer::{Backend, MAX_CONNECTIONS, Options, announce};

/// Receive buffers in all, in bytes.
const ARENA: usize = 4 << 20;
/// Queued pieces at which a connection stops to receive.
const HIGH: usize = 8;
/// Free buffers for each connection that is armed again after there were none.
const RESERVE: usize = 4;

const ACCEPT: u64 = 0;
const RECV: u64 = 1;
const SEND: u64 = 2;
/// Completions that nobody waits for: cancelling, closing.
const IGNORE: u64 = 3;

/// Completions say what they are in the low bits and whose they are in the others.
fn user_data(kind: u64, slot: u32) -> u64 {
    kind | u64::from(slot) << 8
}

/// A part of a receive buffer.
#[derive(Clone, Copy)]
struct Piece {
    buffer: u16,
    start: u32,
    length: u32,
}

#[derive(Default)]
struct Connection {
    open: bool,
    /// A receive is armed.
    receiving: bool,
    /// It is being cancelled, or will not be armed, until the queue is empty.
    paused: bool,
    /// The peer has ended, or the connection broke: no receive is armed any more.
    ended: bool,
    /// What is being sent.
    sending: Option<Piece>,
    /// What is to be sent after it.
    queue: VecDeque<Piece>,
}

/// The ring of receive buffers that the kernel takes from.
struct Buffers {
    entries: *mut BufRingEntry,
    arena: *mut u8,
    count: u16,
    size: usize,
    incremental: bool,
    tail: u16,
    /// In the ring: the kernel may fill them.
    free: usize,
    /// By buffer: pieces of it in use, and bytes that the kernel has filled.
    uses: Vec<u32>,
    filled: Vec<u32>,
    /// By buffer: the kernel is done with it.
    full: Vec<bool>,
}

impl Buffers {
    fn register(submitter: &Submitter<'_>, incremental: bool) -> io::Result<Self> {
        let size = if incremental { 256 * 1024 } else { peer::BUFFER };
        let count = u16::try_from(ARENA / size).expect("few buffers");
        let entries = map(usize::from(count) * size_of::<BufRingEntry>())?.cast::<BufRingEntry>();
        const INCREMENTAL: u16 = 2; // IOU_PBUF_RING_INC
        let flags = if incremental { INCREMENTAL } else { 0 };
        // SAFETY: the entries and the arena are never unmapped.
        unsafe { submitter.register_buf_ring_with_flags(entries as u64, count, 0, flags) }?;
        let mut buffers = Self {
            entries,
            arena: map(ARENA)?,
            count,
            size,
            incremental,
            tail: 0,
            free: 0,
            uses: vec![0; count.into()],
            filled: vec![0; count.into()],
            full: vec![true; count.into()],
        };
        (0..count).for_each(|buffer| buffers.recycle(buffer));
        buffers.publish();
        Ok(buffers)
    }

    /// The bytes of a completed receive.
    fn take(&mut self, buffer: u16, length: u32, flags: u32) -> Piece {
        let at = usize::from(buffer);
        let start = self.filled[at];
        self.filled[at] += length;
        self.uses[at] += 1;
        self.full[at] = !(self.incremental && cqueue::buffer_more(flags));
        if self.full[at] {
            self.free -= 1;
        }
        Piece { buffer, start, length }
    }

    /// A use of a buffer is over.
    fn release(&mut self, buffer: u16) {
        let at = usize::from(buffer);
        self.uses[at] -= 1;
        if self.uses[at] == 0 && self.full[at] {
            self.recycle(buffer);
        }
    }

    /// Puts a buffer into the ring; the kernel sees it after `publish`.
    fn recycle(&mut self, buffer: u16) {
        let at = usize::from(buffer);
        (self.filled[at], self.full[at]) = (0, false);
        self.free += 1;
        // SAFETY: the index is below the number of entries, a power of two; the kernel does not look at this one yet.
        let entry = unsafe { &mut *self.entries.add(usize::from(self.tail & (self.count - 1))) };
        entry.set_addr(self.arena as u64 + (at * self.size) as u64);
        entry.set_len(self.size as u32);
        entry.set_bid(buffer);
        self.tail = self.tail.wrapping_add(1);
    }

    fn publish(&self) {
        // SAFETY: the tail lies in the first entry, and is shared with the kernel: an atomic store.
        let tail = unsafe { &*BufRingEntry::tail(self.entries).cast::<AtomicU16>() };
        tail.store(self.tail, Ordering::Release);
    }

    fn address(&self, piece: Piece) -> *const u8 {
        let offset = usize::from(piece.buffer) * self.size + piece.start as usize;
        // SAFETY: within the arena, since the kernel filled these bytes.
        unsafe { self.arena.add(offset) }
    }
}

/// Zeroed pages, for ever.
fn map(length: usize) -> io::Result<*mut u8> {
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping touches nothing that exists.
    let pages = unsafe { libc::mmap(std::ptr::null_mut(), length, access, kind, -1, 0) };
    if pages == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(pages.cast()) }
}

struct Floor<'a> {
    submitter: Submitter<'a>,
    sq: SubmissionQueue<'a>,
    buffers: Buffers,
    connections: Vec<Connection>,
    /// Who found no buffer.
    starved: VecDeque<u32>,
    discard: bool,
}

impl Floor<'_> {
    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: every entry's memory is the arena, which stays.
        while unsafe { self.sq.push(entry) }.is_err() {
            self.sq.sync();
            self.submitter.submit().expect("submit");
            self.sq.sync();
        }
    }

    fn accept(&mut self, listener: Fd) {
        let entry = opcode::AcceptMulti::new(listener).allocate_file_index(true).build();
        self.push(&entry.user_data(user_data(ACCEPT, 0)));
    }

    fn receive(&mut self, slot: u32) {
        self.connections[slot as usize].receiving = true;
        self.push(&opcode::RecvMulti::new(Fixed(slot), 0).build().user_data(user_data(RECV, slot)));
    }

    fn cancel_receive(&mut self, slot: u32) {
        let entry = opcode::AsyncCancel::new(user_data(RECV, slot)).build();
        self.push(&entry.user_data(user_data(IGNORE, slot)));
    }

    fn send(&mut self, slot: u32, piece: Piece) {
        self.connections[slot as usize].sending = Some(piece);
        let entry = opcode::Send::new(Fixed(slot), self.buffers.address(piece), piece.length)
            .flags(libc::MSG_NOSIGNAL | libc::MSG_WAITALL)
            .build();
        self.push(&entry.user_data(user_data(SEND, slot)));
    }

    fn received(&mut self, slot: u32, result: i32, flags: u32) {
        let connection = &mut self.connections[slot as usize];
        connection.receiving = cqueue::more(flags);
        if result > 0 {
            let buffer = cqueue::buffer_select(flags).expect("a receive with data has a buffer");
            let piece = self.buffers.take(buffer, result as u32, flags);
            if self.discard || connection.ended {
                self.buffers.release(buffer);
            } else if connection.sending.is_none() {
                self.send(slot, piece);
            } else {
                match connection.queue.back_mut() {
                    Some(last) if last.buffer == buffer && last.start + last.length == piece.start => {
                        last.length += piece.length;
                        self.buffers.release(buffer); // One use less: two pieces became one.
                    }
                    _ => connection.queue.push_back(piece),
                }
                if connection.queue.len() >= HIGH && !connection.paused {
                    connection.paused = true;
                    if connection.receiving {
                        self.cancel_receive(slot);
                    }
                }
            }
        }
        let connection = &mut self.connections[slot as usize];
        if !connection.receiving {
            match -result {
                libc::ENOBUFS if !connection.paused => self.starved.push_back(slot),
                libc::ENOBUFS | libc::ECANCELED => {}
                _ if result > 0 => {}
                _ => connection.ended = true,
            }
            // A receive that ended with data is armed again at once; one that was cancelled after its queue had emptied, too.
            self.resume(slot, result > 0 || result == -libc::ECANCELED);
        }
    }

    fn sent(&mut self, slot: u32, result: i32) {
        let connection = &mut self.connections[slot as usize];
        let piece = connection.sending.take().expect("a send was on its way");
        if result > 0 && (result as u32) < piece.length {
            let (start, length) = (piece.start + result as u32, piece.length - result as u32);
            return self.send(slot, Piece { start, length, ..piece });
        }
        self.buffers.release(piece.buffer);
        if result <= 0 {
            connection.ended = true;
            while let Some(piece) = connection.queue.pop_front() {
                self.buffers.release(piece.buffer);
            }
            if connection.receiving {
                self.cancel_receive(slot);
            }
        } else if let Some(next) = connection.queue.pop_front() {
            return self.send(slot, next);
        }
        let paused = std::mem::take(&mut self.connections[slot as usize].paused);
        self.resume(slot, paused);
    }

    /// Arms the receive again if it should be, or closes what is over.
    fn resume(&mut self, slot: u32, wanted: bool) {
        let connection = &mut self.connections[slot as usize];
        if !connection.open {
            return; // It starved, and closed meanwhile.
        }
        let idle = connection.sending.is_none() && connection.queue.is_empty();
        if connection.ended && !connection.receiving && idle {
            *connection = Connection::default();
            self.push(&opcode::Close::new(Fixed(slot)).build().user_data(user_data(IGNORE, slot)));
        } else if wanted && !connection.receiving && !connection.paused && !connection.ended {
            self.receive(slot);
        }
    }

    fn feed_starved(&mut self) {
        let armed = self.buffers.free.div_ceil(RESERVE).min(self.starved.len());
        let turn: Vec<u32> = if armed == 0 { Vec::new() } else { self.starved.drain(..armed).collect() };
        for slot in turn {
            self.resume(slot, true);
        }
    }
}

fn main() -> io::Result<()> {
    let options = Options::parse();
    let incremental = match options.extra("buffers") {
        None | Some("plain") => false,
        Some("incremental") => true,
        Some(other) => panic!("--buffers {other}: expected plain or incremental"),
    };
    let mut ring: IoUring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_submit_all()
        .setup_no_sqarray()
        .setup_cqsize(32768)
        .build(1024)?;
    let (submitter, sq, mut cq) = ring.split();
    submitter.register_files_sparse(MAX_CONNECTIONS as u32)?;
    let buffers = Buffers::register(&submitter, incremental)?;
    let mut floor = Floor {
        submitter,
        sq,
        buffers,
        connections: std::iter::repeat_with(Connection::default).take(MAX_CONNECTIONS).collect(),
        starved: VecDeque::new(),
        discard: options.discard,
    };
    floor.submitter.register_ring_fd()?;
    let listener = options.listener();
    let driver = if incremental { "multishot, incremental buffers" } else { "multishot, provided buffers" };
    announce(listener.local_addr()?, "io-uring", Backend::IoUring, driver);
    floor.accept(Fd(listener.as_raw_fd()));
    loop {
        floor.sq.sync();
        match floor.submitter.submit_and_wait(1) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => other?,
        };
        floor.sq.sync();
        cq.sync();
        for entry in &mut cq {
            let (result, flags) = (entry.result(), entry.flags());
            let slot = (entry.user_data() >> 8) as u32;
            match entry.user_data() & 0xff {
                RECV => floor.received(slot, result, flags),
                SEND => floor.sent(slot, result),
                ACCEPT => {
                    if result >= 0 {
                        floor.connections[result as usize].open = true;
                        floor.receive(result as u32);
                    } else {
                        eprintln!("accept: {}", io::Error::from_raw_os_error(-result));
                    }
                    if !cqueue::more(flags) {
                        floor.accept(Fd(listener.as_raw_fd()));
                    }
                }
                _ => {}
            }
        }
        floor.feed_starved();
        floor.buffers.publish();
    }
}
