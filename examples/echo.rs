//! The smallest server: what arrives goes back, in the buffer that it arrived in.
//!
//! `cargo run --release --example echo -- 127.0.0.1:7000`

use corelane::{Accepted, Buf, Conn, Cx, Handler, Runtime, Signals};
use std::{error::Error, time::Duration};

struct Echo;

impl Handler for Echo {
    type Conn = ();
    type Message = ();

    fn on_accept(&mut self, _: &mut Cx<'_, Self>, _: Accepted) -> Option<()> {
        Some(())
    }

    fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
        // Refused only when the connection is closing: nobody waits for the echo then.
        let _ = conn.send(data);
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let signals = Signals::block()?;
    let addr = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:7000".to_owned());
    let addr: std::net::SocketAddr = addr.parse()?;
    let runtime = Runtime::builder().listen(addr).start(|_| Echo)?;
    println!("listening on {}", runtime.info().listeners[0].addr);
    println!("{}", runtime.run_until(&signals, Duration::from_secs(5))?);
    Ok(())
}
