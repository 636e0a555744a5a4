//! A TCP proxy: every accepted connection gets an outgoing one, and what arrives on one is sent on
//! the other in the very buffer that it arrived in.
//!
//! Back-pressure crosses over: while one side is congested (its peer does not read), the other
//! side's receiving is paused, so that the proxy holds little more than the water mark for each.
//!
//! `cargo run --release --example proxy -- LISTEN TARGET`

use corelane::{Accepted, Buf, Closed, Conn, ConnId, ConnectConfig, Cx, Handler, Runtime, Signals};
use std::{error::Error, net::SocketAddr, time::Duration};

struct Proxy {
    target: SocketAddr,
}

impl Handler for Proxy {
    /// The other side.
    type Conn = ConnId;
    type Message = ();

    fn on_accept(&mut self, cx: &mut Cx<'_, Self>, accepted: Accepted) -> Option<ConnId> {
        // Refused when the worker is full: the client is closed then.
        cx.connect(ConnectConfig::new(self.target), accepted.id).ok()
    }

    fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
        let other = *conn.state();
        // What comes before the other side is connected waits in its queue.
        let Some(mut other) = conn.other(other) else { return conn.close() };
        let sent = other.send(data).is_ok();
        if other.is_congested() {
            conn.pause();
        }
        if !sent {
            conn.close();
        }
    }

    fn on_writable(&mut self, conn: &mut Conn<'_, Self>) {
        let other = *conn.state();
        if let Some(mut other) = conn.other(other) {
            other.resume();
        }
    }

    fn on_eof(&mut self, conn: &mut Conn<'_, Self>) {
        // A half-close goes through as it is; a connection ends when both directions have.
        let other = *conn.state();
        match conn.other(other) {
            Some(mut other) => other.shutdown_write(),
            None => conn.close(),
        }
    }

    fn on_closed(&mut self, cx: &mut Cx<'_, Self>, closed: Closed<ConnId>) {
        if let Some(mut other) = cx.conn(closed.state) {
            other.close();
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let signals = Signals::block()?;
    let mut args = std::env::args().skip(1);
    let (Some(listen), Some(target)) = (args.next(), args.next()) else {
        return Err("usage: proxy LISTEN TARGET".into());
    };
    let (listen, target): (SocketAddr, SocketAddr) = (listen.parse()?, target.parse()?);
    let runtime = Runtime::builder().listen(listen).start(move |_| Proxy { target })?;
    println!("listening on {}", runtime.info().listeners[0].addr);
    println!("{}", runtime.run_until(&signals, Duration::from_secs(5))?);
    Ok(())
}
