//! A push server: what is typed on standard input goes to every connection, from a thread that is
//! not the runtime's. Connections that say nothing for a minute are closed.
//!
//! `cargo run --release --example broadcast -- 127.0.0.1:7000`

use corelane::{Accepted, Buf, Closed, Conn, Cx, Handler, ListenerConfig, Runtime, WorkerConfig};
use std::{error::Error, io::BufRead, time::Duration};

struct Push;

/// What is known of one listener.
#[derive(Default)]
struct Listener {
    heard: u64,
}

impl Handler for Push {
    type Conn = Listener;
    type Message = ();

    fn on_accept(&mut self, _: &mut Cx<'_, Self>, accepted: Accepted) -> Option<Listener> {
        println!("{} joined from {:?}", accepted.id, accepted.peer);
        Some(Listener::default())
    }

    fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
        // A sign of life; what it says does not matter.
        conn.state().heard += data.len() as u64;
    }

    fn on_closed(&mut self, _: &mut Cx<'_, Self>, closed: Closed<Listener>) {
        println!("{} left ({}), {} bytes heard", closed.id, closed.reason, closed.state.heard);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let addr = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:7000".to_owned());
    let worker = WorkerConfig {
        idle_timeout: Some(Duration::from_secs(60)),
        peer_addresses: true,
        ..WorkerConfig::default()
    };
    let listener = ListenerConfig::new(addr.parse()?);
    let runtime = Runtime::builder().worker(worker).listen(listener).start(|_| Push)?;
    println!("listening on {}; type lines to send them", runtime.info().listeners[0].addr);
    for line in std::io::stdin().lock().lines() {
        // One allocation for any number of receivers.
        runtime.remote().broadcast(line? + "\n")?;
    }
    println!("{}", runtime.shutdown(Duration::from_secs(2))?);
    Ok(())
}
