//! ntex on its io_uring runtime ("neon-uring"): a service that gets the connection, and its own accepting thread.
//!
//! What was read goes to the write buffer as it is, as ntex's dispatchers do it: no copy.

use std::io;

use ntex::SharedCfg;
use ntex::io::{Io, IoConfig};
use ntex::service::fn_service;
use ntex::util::BytesMut;
use peer::{BACKLOG, BUFFER, Backend, Options, announce};

fn main() -> io::Result<()> {
    let options = Options::parse();
    let listener = options.listener();
    let addr = listener.local_addr()?;
    let discard = options.discard;
    ntex::rt::System::new("echo", ntex::rt::DefaultRuntime).block_on(async move {
        let server = ntex::server::build()
            .backlog(BACKLOG)
            .maxconn(peer::MAX_CONNECTIONS)
            .workers(options.workers)
            .disable_signals()
            .listen("echo", listener, async move |_| {
                fn_service(move |io: Io| async move { if discard { take(io).await } else { echo(io).await } })
            })?
            .config("echo", SharedCfg::new("ECHO").add(IoConfig::new().set_read_buf(BUFFER, 1024, 16)))
            .run();
        announce(addr, "ntex", Backend::IoUring, "neon-uring");
        server.await
    })
}

async fn echo(io: Io) -> io::Result<()> {
    while io.read_ready().await?.is_some() {
        let data = io.with_read_buf(BytesMut::take);
        if !data.is_empty() {
            io.encode_bytes(data)?;
            // Waits only while more than the write buffer's limit is unsent.
            io.flush(false).await?;
        }
    }
    Ok(())
}

async fn take(io: Io) -> io::Result<()> {
    while io.read_ready().await?.is_some() {
        io.with_read_buf(BytesMut::clear);
    }
    Ok(())
}
