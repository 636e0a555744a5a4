//! corelane: a completion-based network runtime.
//!
//! One event loop per core; each loop owns a kernel interface (io_uring; epoll where that is forbidden; completion
//! ports on Windows), a pool of preregistered buffers and a table
//! of connections. The kernel says what finished, the loop tells your [`Handler`], your handler says
//! what to do next. Operations and buffers are reused for a connection's whole life: in steady
//! state nothing is allocated, and an idle connection holds no buffer.
//!
//! ```no_run
//! use corelane::{Accepted, Buf, Conn, Cx, Handler, Runtime};
//! use std::time::Duration;
//!
//! struct Echo;
//!
//! impl Handler for Echo {
//!     type Conn = ();
//!     type Message = ();
//!     fn on_accept(&mut self, _: &mut Cx<'_, Self>, _: Accepted) -> Option<()> {
//!         Some(())
//!     }
//!     fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
//!         let _ = conn.send(data); // the received buffer itself, not a copy
//!     }
//! }
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let signals = corelane::Signals::block()?;
//!     let addr: std::net::SocketAddr = "127.0.0.1:7000".parse()?;
//!     let runtime = Runtime::builder().listen(addr).start(|_| Echo)?;
//!     println!("{}", runtime.run_until(&signals, Duration::from_secs(5))?);
//!     Ok(())
//! }
//! ```
//!
//! The same as async code, on the same engine ([`task`], [`net`], [`time`], [`sync`], [`Server`]):
//!
//! ```no_run
//! use corelane::net::TcpListener;
//! use corelane::{Runtime, Server};
//! use std::time::Duration;
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let signals = corelane::Signals::block()?;
//!     let addr: std::net::SocketAddr = "127.0.0.1:7000".parse()?;
//!     let runtime = Runtime::builder().listen(addr).start_tasks(|_| async {
//!         let listener = TcpListener::of_builder(0);
//!         Server::new().serve(listener, |mut stream| async move {
//!             while let Some(data) = stream.recv().await? {
//!                 stream.send(data).await?;
//!             }
//!             std::io::Result::Ok(())
//!         }).await
//!     })?;
//!     println!("{}", runtime.run_until(&signals, Duration::from_secs(5))?);
//!     Ok(())
//! }
//! ```
//!
//! # Where things are
//!
//! | module | what it is |
//! |---|---|
//! | `runtime` | starting and stopping: [`Runtime`], [`Builder`], [`RuntimeInfo`], [`ShutdownReport`] |
//! | `handler` | the door to your code: [`Handler`], [`Cx`], [`Conn`], [`ConnId`], [`CloseReason`] |
//! | `worker` | policy: connection table, send queues, back-pressure, timers, limits, mailbox ([`Remote`]) |
//! | `driver` | mechanism: `uring`, `epoll`, `iocp` and `sim` behind one trait |
//! | `buffer` | memory: the arena and its leases ([`Buf`], [`Payload`]) |
//! | `config` | what can be set: [`WorkerConfig`], [`ListenerConfig`], [`SocketOptions`] |
//! | `wait` | how a worker waits: [`WaitPolicy`] |
//! | `metrics` | counters: [`Metrics`], [`Snapshot`] |
//! | [`task`] | the async tier: executor, as one handler among others |
//! | [`net`] | sockets for tasks: TCP, UDP, Unix |
//! | [`time`] | timers for tasks |
//! | `server` | [`Server`]: accept loop, limits, drain and report for tasks |
//! | [`sync`] | between tasks: permits, notifications, tokens, broadcasts |
//! | [`sim`] | a simulated kernel with a virtual clock and a seed, for testing handlers |
//!
//! Dependencies point downwards only: server → net, time, sync → task → runtime → worker → driver → buffer. `unsafe` code is in
//! `buffer`, `driver` and `task/waker.rs`; its invariants are numbered and explained in `SAFETY.md`.

mod buffer;
mod clock;
mod config;
mod driver;
mod handler;
mod metrics;
pub mod net;
mod runtime;
mod server;
pub mod sim;
pub mod sync;
pub mod task;
pub mod time;
mod wait;
mod worker;

pub use buffer::{Buf, BufMut, BufferConfig, BufferError, Detached, Payload};
pub use clock::Time;
pub use config::{
    Backend, ConfigError, ConnectConfig, Descriptors, Keepalive, ListenerConfig, Sharing, SocketOptions,
    UringFeatures, WorkerConfig,
};
pub use driver::sys::{Signals, raise_nofile_limit};
pub use driver::{Feature, SetupError};
pub use handler::{
    Accepted, CloseReason, Closed, Conn, ConnId, ConnectError, ConnectErrorKind, Cx, Handler, SendError,
    SendErrorKind, Taken,
};
pub use metrics::{Metrics, Snapshot};
pub use runtime::{
    Builder, ListenerInfo, Runtime, RuntimeError, RuntimeInfo, ShutdownReport, StartError, WorkerInfo,
};
pub use server::{HandlerFailure, Listen, Listening, ServeError, Server, ServerReport};
pub use sync::ShutdownToken;
pub use wait::WaitPolicy;
pub use worker::{Remote, RemoteError};
