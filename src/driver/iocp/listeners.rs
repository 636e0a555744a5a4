//! Listeners and their accept operations.
//!
//! The packets of a listening socket come to one port for the socket's life. A runtime with one worker has
//! them come to the worker's own. With several workers none of their ports will do, because the accepts are
//! theirs all the same: then the socket has a port of its own, and a thread that forwards each packet to the
//! port of the worker that started the operation. It costs a thread per listener, which sleeps except
//! while connections are accepted, and one more hop per connection; the alternative, one of the workers
//! forwarding for the others, would make everybody's accepts wait for that worker's handlers, and its end
//! the end of all.
//!
//! How it ends: an accept that is in flight keeps its listener, and through it the socket and the thread,
//! whoever else has let go of them ([`Listeners::remove`] waits for the last packet). So when the last
//! holder lets go, no packet is on its way, and the thread is told to quit and joined.
//!
//! A listener's record, with its operation objects, is used again when it was removed and none of them is with
//! the kernel, nor the end of one untold.

use std::io;
use std::net::TcpListener;
use std::os::windows::io::{AsRawSocket, OwnedSocket};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use windows_sys::Win32::Networking::WinSock::SOCKET;
use windows_sys::Win32::System::IO::OVERLAPPED_ENTRY;

use crate::config::SocketOptions;
use crate::driver::{self, Key, ListenerId, MAX_LISTENERS, sys};

use super::error;
use super::ext::Extensions;
use super::op::{AcceptOp, Kind};
use super::port::{self, Port};
use super::socket::{self, Started};

/// Accepts that may be armed on one listener at a time.
pub(super) const ONCE_OPS: u32 = 16;

/// A listening socket that all workers of a runtime accept from.
pub(crate) struct IocpListener(Arc<Shared>);

struct Shared {
    socket: TcpListener,
    ipv6: bool,
    /// What accepted sockets get.
    options: SocketOptions,
    /// With several workers.
    pump: Option<Pump>,
}

/// The thread that forwards packets.
struct Pump {
    port: Arc<Port>,
    thread: Option<JoinHandle<()>>,
}

impl IocpListener {
    /// A handle for each of several workers. `options`: what accepted sockets get.
    ///
    /// # Errors
    /// When the system has no room for the port or the thread that several workers need.
    pub(crate) fn share(
        socket: TcpListener,
        options: &SocketOptions,
        workers: usize,
    ) -> io::Result<Vec<Self>> {
        let pump = if workers > 1 { Some(Pump::start(raw(&socket))?) } else { None };
        let shared = Arc::new(Shared::new(socket, options, pump)?);
        Ok((0..workers).map(|_| Self(Arc::clone(&shared))).collect())
    }

    /// For one worker alone.
    pub(super) fn alone(socket: TcpListener, options: &SocketOptions) -> io::Result<Self> {
        Ok(Self(Arc::new(Shared::new(socket, options, None)?)))
    }
}

fn raw(socket: &impl AsRawSocket) -> SOCKET {
    socket.as_raw_socket() as SOCKET
}

impl Pump {
    fn start(socket: SOCKET) -> io::Result<Self> {
        let port = Arc::new(Port::new()?);
        port.associate(socket)?;
        let thread = thread::Builder::new().name("corelane-accept".to_owned()).spawn({
            let port = Arc::clone(&port);
            move || forward(&port)
        })?;
        Ok(Self { port, thread: Some(thread) })
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        self.port.post(0, port::QUIT, std::ptr::null_mut());
        if let Some(thread) = self.thread.take() {
            // It does nothing that panics.
            let _ = thread.join();
        }
    }
}

/// Forwards packets until it is told to quit.
fn forward(port: &Port) {
    let mut entries = [OVERLAPPED_ENTRY::default(); 32];
    loop {
        // The port is open, so a wait does not fail; if it does all the same, accepting stops, which
        // is better than a thread that spins.
        let Ok(taken) = port.wait(&mut entries, None) else { return };
        for entry in &entries[..taken] {
            if entry.lpCompletionKey == port::QUIT {
                return;
            }
            let target = AcceptOp::target_of(entry.lpOverlapped);
            target.post(entry.dwNumberOfBytesTransferred, port::OP, entry.lpOverlapped);
        }
    }
}

struct Listener {
    shared: Option<Arc<Shared>>,
    /// The worker is done with it; it goes with the last packet.
    removed: bool,
    /// Accepts that could not be started, of which that is still to be told.
    owed: u32,
    ops: Box<[AcceptOp]>,
}

#[derive(Default)]
pub(super) struct Listeners {
    all: Vec<Listener>,
}

/// What came of an accept.
pub(super) struct Ended {
    pub(super) socket: OwnedSocket,
    pub(super) peer: Option<std::net::SocketAddr>,
}

impl Listeners {
    /// Takes over a listener; `port` is the one that the worker waits on.
    pub(super) fn add(
        &mut self,
        IocpListener(shared): IocpListener,
        port: &Arc<Port>,
    ) -> io::Result<ListenerId> {
        let vacant = self.all.iter().position(Listener::is_vacant);
        if vacant.is_none() && self.all.len() == MAX_LISTENERS {
            return Err(driver::too_many_listeners());
        }
        if shared.pump.is_none() {
            port.associate(raw(&shared.socket))?;
        }
        let index = vacant.unwrap_or_else(|| {
            let ops = (0..ONCE_OPS).map(|_| AcceptOp::new(port)).collect();
            self.all.push(Listener { shared: None, removed: true, owed: 0, ops });
            self.all.len() - 1
        });
        let listener = &mut self.all[index];
        (listener.shared, listener.removed) = (Some(shared), false);
        Ok(ListenerId(index as u16))
    }

    /// Closes the listening socket, as soon as no accept is with the kernel.
    pub(super) fn remove(&mut self, id: ListenerId) {
        if let Some(listener) = self.all.get_mut(usize::from(id.0)) {
            listener.removed = true;
            listener.let_go();
        }
    }

    /// Starts an accept.
    ///
    /// # Errors
    /// The error number, when none could be started.
    pub(super) fn arm(&self, id: ListenerId, extensions: &[Option<Extensions>; 2]) -> Result<(), i32> {
        let listener = self.all.get(usize::from(id.0)).filter(|listener| !listener.removed);
        let (listener, shared) = listener
            .and_then(|listener| Some((listener, listener.shared.as_ref()?)))
            .ok_or(error::BAD_SOCKET)?;
        let extensions = extensions[usize::from(shared.ipv6)].as_ref().ok_or(error::UNSUPPORTED)?;
        let index = listener.ops.iter().position(|op| !op.armed.get()).ok_or(error::NO_ROOM)?;
        let op = &listener.ops[index];
        let socket = sys::accept_socket(shared.ipv6)
            .map_err(|error| error.raw_os_error().unwrap_or(error::NO_ROOM))?;
        op.op.begin(Kind::Accept, Key { slot: id.0.into(), generation: index as u32 });
        match extensions.accept(raw(&shared.socket), raw(&socket), op) {
            Started::Failed(number) => Err(error::of_accept(number)),
            Started::Pending | Started::Done(_) => {
                op.socket.set(Some(socket));
                op.armed.set(true);
                Ok(())
            }
        }
    }

    /// Notes that an accept which could not be started is still to be told of (1), or was (-1).
    pub(super) fn owe(&mut self, id: ListenerId, change: i32) {
        if let Some(listener) = self.all.get_mut(usize::from(id.0)) {
            listener.owed = listener.owed.saturating_add_signed(change);
        }
    }

    /// Cancels every accept of a listener; each still ends with a packet. Returns how many there are.
    pub(super) fn cancel(&self, id: ListenerId) -> u64 {
        let Some(listener) = self.all.get(usize::from(id.0)) else { return 0 };
        let Some(shared) = &listener.shared else { return 0 };
        let mut cancelled = 0;
        for op in listener.ops.iter().filter(|op| op.armed.get()) {
            socket::cancel(raw(&shared.socket), &op.op);
            cancelled += 1;
        }
        cancelled
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = ListenerId> + use<> {
        (0..self.all.len()).map(|index| ListenerId(index as u16))
    }

    /// What came of an accept whose packet was taken; `None` if it was not in flight.
    pub(super) fn ended(
        &mut self,
        id: ListenerId,
        index: u32,
        extensions: &[Option<Extensions>; 2],
        wants_peer: bool,
    ) -> Option<Result<Ended, i32>> {
        let listener = self.all.get_mut(usize::from(id.0))?;
        let op = listener.ops.get(index as usize)?;
        if !op.armed.replace(false) {
            return None;
        }
        let result = match (op.socket.take(), &listener.shared) {
            (Some(socket), Some(shared)) => match error::of_status(op.op.status()) {
                Some(number) => Err(number),
                None => shared.accepted(socket).map(|socket| {
                    let extensions = extensions[usize::from(shared.ipv6)].as_ref();
                    let peer = extensions.filter(|_| wants_peer).and_then(|extensions| op.peer(extensions));
                    Ended { socket, peer }
                }),
            },
            // An accept that is in flight has both.
            _ => Err(error::BAD_SOCKET),
        };
        listener.let_go();
        Some(result.map_err(error::of_accept))
    }
}

impl Listener {
    fn is_vacant(&self) -> bool {
        self.shared.is_none() && self.owed == 0
    }

    /// Lets go of the socket if the worker did, and no accept is with the kernel.
    fn let_go(&mut self) {
        if self.removed && self.ops.iter().all(|op| !op.armed.get()) {
            self.shared = None;
        }
    }
}

impl Shared {
    fn new(socket: TcpListener, options: &SocketOptions, pump: Option<Pump>) -> io::Result<Self> {
        let ipv6 = socket.local_addr()?.is_ipv6();
        Ok(Self { socket, ipv6, options: options.clone(), pump })
    }

    /// Makes a connection of a socket that was accepted into.
    fn accepted(&self, socket: OwnedSocket) -> Result<OwnedSocket, i32> {
        socket::finish_accept(raw(&socket), raw(&self.socket))?;
        let set = sys::set_options(socket.as_raw_socket(), &self.options);
        set.map_err(|error| error.raw_os_error().unwrap_or(error::UNSUPPORTED))?;
        Ok(socket)
    }
}
