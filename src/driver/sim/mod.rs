//! A simulated kernel: virtual sockets, a virtual clock, one seed.
//!
//! It exists so that the worker, and the handlers on it, can be tested where a real kernel cannot be
//! steered: an exhausted pool, a cancel that loses its race, a completion that comes late, a reset
//! between two segments, an hour of idling. Everything that could happen either way is drawn from
//! one seeded generator, nothing from the machine it runs on, so a seed names a whole history.
//!
//! # The model
//!
//! ```text
//!   worker ── SimDriver ── ring ─┐                         ┌─ scripted peer (foreign client)
//!   worker ── SimDriver ── ring ─┼── world: clock, agenda ─┼─ scripted peer (accepted by
//!                                │   connections, listeners │     a foreign server)
//! ```
//!
//! * The [`World`] holds everything, and an *agenda* of what will happen when. The
//!   clock moves only from one entry to the next; nothing ever blocks, there are no threads.
//! * A *connection* ([`tcp`]) has two ends and a pipe from each to the other: bytes written but
//!   not sent (bounded), packets on the wire (in order), bytes arrived but not read (bounded, by
//!   credit that comes back as late as everything else). FIN, RST and the handshake are packets
//!   among the data. Each end belongs to a ring, to a scripted peer, or to nobody (in an accept
//!   queue, accepted but not adopted, closed).
//! * A *datagram socket* ([`datagram`]) belongs to a ring or to a scripted peer, and has a queue of its own. What is
//!   sent is on the agenda until it arrives, and whose it is turns out then.
//! * A *ring* ([`ring`]) is what a driver talks to: submissions that the kernel has not seen,
//!   operations that it has, task work, completions. A wait submits everything, runs at most twenty
//!   pieces of task work, and notes until when its thread would have slept. Its [`Shape`] says what the
//!   kernel can do and how long its queues are.
//! * A *fault* strikes at a *chance* ([`script`]): because somebody called for it, or because the
//!   generator says so ([`faults`]).
//! * A *peer* ([`peer`]) is a foreign program that does what a test tells it.
//!
//! # Who owns the chain that is being sent
//!
//! | from | until | owner |
//! |---|---|---|
//! | `send` | the operation's end | the operation, in the ring's `ops`; its bytes are read piece by piece as room appears, never earlier |
//! | the operation's end | `next_event` | the completion, perhaps held back on the agenda |
//! | `next_event` | | the worker (`Sent`), or nobody: cleared, if the connection is being closed |
//!
//! A datagram that is being sent belongs to its operation until that has ended.
//!
//! Receive buffers are taken from the worker's pool when data is moved into them, so that a pool
//! that is empty at that moment ends the receive, as it does in Linux.
//!
//! | file | what is in it |
//! |---|---|
//! | `world.rs` | clock, agenda, listeners |
//! | `net.rs` | who reaches whom and how fast; repetition, giving up, stalls |
//! | `tcp.rs` | handshake, data, FIN, RST |
//! | `ring.rs` | what a ring consists of; when its thread has something to do |
//! | `operate.rs` | submissions, task work, completions and their order |
//! | `transfer.rs` | accepting, receiving and sending |
//! | `control.rs` | listeners made at run time, addresses, options, Unix streams |
//! | `datagram.rs` | datagram sockets |
//! | `cancel.rs` | cancelling, closing, buffers that are held |
//! | `faults.rs`, `script.rs` | what goes wrong by chance, and on demand |
//! | `peer.rs` | scripted peers |
//! | `driver.rs` | the door to the worker |
//!
//! # What differs from Linux
//!
//! Acknowledgements cannot be seen, so nothing depends on them but credit. There is no congestion control, no
//! keepalive, no `TCP_USER_TIMEOUT`, no linger time, no `TIME_WAIT`; socket options are ignored. A repetition
//! is only of what a partition, a stall or a full accept queue held back. A closing socket waits for ever for
//! a peer that does not read. Source addresses are not checked for being in use. A listener made at run time
//! is on its worker's host, if the worker has one, also where it asks for any address. Unix streams take time
//! and meet the network's faults (`control.rs`); there are no Unix datagrams, and no broadcast, multicast or
//! joining of datagrams (`datagram.rs`). A worker's turn takes no time here; [`crate::sim`] adds some.
//!
//! What may not enter this room: threads, real time, hash maps (their order is not the seed's),
//! `unsafe`.

mod cancel;
mod control;
mod datagram;
mod driver;
mod errno;
mod faults;
mod net;
mod operate;
mod peer;
mod ring;
mod rng;
mod script;
mod tcp;
mod trace;
mod transfer;
mod world;

#[cfg(test)]
mod tests;

pub(crate) use driver::{SimDriver, SimListener};
pub use faults::Faults;
pub(crate) use peer::{PeerPhase, PeerState};
pub(crate) use ring::Shape;
pub(crate) use rng::Rng;
pub use script::{Fault, Shortage, When};
pub(crate) use script::{Place, Strike};
pub(crate) use trace::Actor;
pub(crate) use world::{Settings, Shared, World};
