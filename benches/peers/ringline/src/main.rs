//! ringline on its io_uring backend: a task for each connection on one worker, plus ringline's own accepting thread.
//!
//! `--flavor held` (default): what its documentation says for byte pipes such as echo: received buffers are held in place
//! and sent from there, gathered, one send at a time. `--flavor data`: its README's echo, with a closure that sees the
//! bytes and sends the receive buffer on.

use std::future::Future;
use std::io;
use std::sync::OnceLock;
use std::time::Duration;

use peer::{BACKLOG, BUFFER, Backend, MAX_CONNECTIONS, Options, announce};
use ringline::{AsyncEventHandler, ConfigBuilder, ConnCtx, ParseResult, RinglineBuilder};

#[derive(Clone, Copy)]
enum Flavor {
    Held,
    Data,
    Discard,
}

static FLAVOR: OnceLock<Flavor> = OnceLock::new();

struct Echo(Flavor);

impl AsyncEventHandler for Echo {
    fn on_accept(&self, conn: ConnCtx) -> impl Future<Output = ()> + 'static {
        let flavor = self.0;
        async move {
            // An error ends the connection; there is nobody to tell.
            let _ = match flavor {
                Flavor::Held => held(conn).await,
                Flavor::Data => data(conn).await,
                Flavor::Discard => discard(conn).await,
            };
        }
    }

    fn create_for_worker(_: usize) -> Self {
        Self(*FLAVOR.get().expect("set before the launch"))
    }
}

async fn held(conn: ConnCtx) -> io::Result<()> {
    conn.enable_recv_forward();
    loop {
        conn.recv_ready().await;
        if conn.forward_held()?.await? == 0 {
            return Ok(());
        }
    }
}

async fn data(conn: ConnCtx) -> io::Result<()> {
    let mut refused = Vec::new();
    loop {
        let length = conn
            .with_data(|data| {
                // Refused when ringline's pool of send buffers is in use.
                if conn.forward_recv_buf(data).is_err() {
                    refused.extend_from_slice(data);
                }
                ParseResult::Consumed(data.len())
            })
            .await;
        if length == 0 {
            return Ok(());
        }
        while !refused.is_empty() {
            let piece = refused.len().min(BUFFER);
            match conn.send(&refused[..piece]) {
                Ok(sending) => {
                    sending.await?;
                    refused.drain(..piece);
                }
                Err(error) if error.kind() == io::ErrorKind::Other => {
                    ringline::sleep(Duration::from_millis(1)).await
                }
                Err(error) => return Err(error),
            }
        }
    }
}

async fn discard(conn: ConnCtx) -> io::Result<()> {
    while conn.with_data(|data| ParseResult::Consumed(data.len())).await > 0 {}
    Ok(())
}

fn main() {
    let options = Options::parse();
    let flavor = match options.extra("flavor") {
        _ if options.discard => Flavor::Discard,
        None | Some("held") => Flavor::Held,
        Some("data") => Flavor::Data,
        Some(other) => panic!("--flavor {other}: expected held or data"),
    };
    FLAVOR.get_or_init(|| flavor);
    let config = ConfigBuilder::new()
        .workers(options.workers)
        // The process is pinned already.
        .pin_to_core(false)
        .backlog(BACKLOG)
        .tcp_nodelay(true)
        .max_connections(MAX_CONNECTIONS as u32)
        .accept_queue_capacity(MAX_CONNECTIONS)
        // The same 4 MiB as corelane and the floor.
        .recv_buffer(256, BUFFER as u32)
        // One gathered send a connection may be on its way.
        .send_slab_slots(MAX_CONNECTIONS as u16)
        .standalone_task_capacity(16)
        // No periodic tick, and none of the pools that an echo server has no use for.
        .tick_timeout_us(0)
        .timer_slots(1024)
        .no_fs()
        .resolver_threads(0)
        .spawner_threads(0)
        .blocking_threads(0)
        .build()
        .expect("a valid configuration");
    let (shutdown, workers) =
        RinglineBuilder::new(config).bind(options.listen).launch::<Echo>().expect("ringline's workers");
    announce(shutdown.bound_addr().expect("the address"), "ringline", Backend::IoUring, "uring");
    for worker in workers {
        if let Err(error) = worker.join().expect("a worker panicked") {
            eprintln!("worker: {error:?}");
            std::process::exit(1);
        }
    }
}
