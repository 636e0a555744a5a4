//! The three servers.

use corelane::{Accepted, Buf, CloseReason, Conn, Cx, Handler};

/// Sends back what it receives: the very buffer, nothing is copied.
pub struct Echo;

impl Handler for Echo {
    type Conn = ();
    type Message = ();

    fn on_accept(&mut self, _: &mut Cx<'_, Self>, _: Accepted) -> Option<()> {
        Some(())
    }

    fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
        // Refused only while the connection closes: receiving pauses long before the queue is full.
        let _ = conn.send(data);
    }
}

/// Takes everything, answers nothing.
pub struct Discard;

impl Handler for Discard {
    type Conn = ();
    type Message = ();

    fn on_accept(&mut self, _: &mut Cx<'_, Self>, _: Accepted) -> Option<()> {
        Some(())
    }

    fn on_data(&mut self, _: &mut Conn<'_, Self>, _: Buf) {}
}

/// Answers each line `ping\n` with `pong\n`.
///
/// A line that is something else is a protocol error, and so is one that grows over the limit: the
/// peer is told so in one line, and its connection is closed with [`CloseReason::Limit`].
pub struct Heartbeat {
    max_line: u32,
}

impl Heartbeat {
    /// Lines may have `max_line` bytes, the newline included.
    pub fn new(max_line: u32) -> Self {
        Self { max_line }
    }
}

/// What is expected, and what is answered.
const PING: &[u8] = b"ping\n";
pub const PONG: &[u8] = b"pong\n";

/// Many answers in a row, so that any number of pings in one piece costs one send.
pub static PONGS: [u8; 256 * PONG.len()] = {
    let mut bytes = [0; 256 * PONG.len()];
    let mut at = 0;
    while at < bytes.len() {
        bytes[at] = PONG[at % PONG.len()];
        at += 1;
    }
    bytes
};

/// The line that a connection is in the middle of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Line {
    /// Bytes of it that have arrived.
    length: u32,
    /// Whether they differ from the beginning of a ping.
    other: bool,
}

/// What a piece of input amounts to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// So many pings were completed.
    Pings(usize),
    /// After so many, a line that is no ping.
    Unknown(usize),
    /// After so many, a line over the limit.
    TooLong(usize),
}

impl Verdict {
    /// How many pings are to be answered.
    pub fn pings(self) -> usize {
        match self {
            Self::Pings(pings) | Self::Unknown(pings) | Self::TooLong(pings) => pings,
        }
    }

    /// What the peer is told before its connection is closed.
    pub fn complaint(self) -> Option<&'static str> {
        match self {
            Self::Pings(_) => None,
            Self::Unknown(_) => Some("error: expected ping\n"),
            Self::TooLong(_) => Some("error: line too long\n"),
        }
    }
}

impl Line {
    /// Reads a piece of input, however it is cut.
    pub fn read(&mut self, mut input: &[u8], max_line: u32) -> Verdict {
        let mut pings = 0;
        while !input.is_empty() {
            if *self == Self::default() && input.starts_with(PING) {
                // The common case: a whole ping at the beginning of a line.
                pings += 1;
                input = &input[PING.len()..];
                continue;
            }
            let end = input.iter().position(|&byte| byte == b'\n').map(|at| at + 1);
            let piece = &input[..end.unwrap_or(input.len())];
            let before = self.length as usize;
            self.other |= PING.get(before..before + piece.len()) != Some(piece);
            self.length = self.length.saturating_add(piece.len().try_into().unwrap_or(u32::MAX));
            if self.length > max_line {
                return Verdict::TooLong(pings);
            }
            input = &input[piece.len()..];
            if end.is_some() {
                if self.other {
                    return Verdict::Unknown(pings);
                }
                pings += 1;
                *self = Self::default();
            }
        }
        Verdict::Pings(pings)
    }
}

impl Handler for Heartbeat {
    type Conn = Line;
    type Message = ();

    fn on_accept(&mut self, _: &mut Cx<'_, Self>, _: Accepted) -> Option<Line> {
        Some(Line::default())
    }

    fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
        let verdict = conn.state().read(&data, self.max_line);
        let mut pings = verdict.pings();
        while pings > 0 {
            let now = pings.min(PONGS.len() / PONG.len());
            // Refused only while the connection closes, as in `Echo`.
            let _ = conn.send(&PONGS[..now * PONG.len()]);
            pings -= now;
        }
        if let Some(complaint) = verdict.complaint() {
            let _ = conn.send(complaint);
            conn.close_with(CloseReason::Limit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds `input` in pieces of `size` bytes.
    fn read(input: &[u8], size: usize) -> Verdict {
        let mut line = Line::default();
        let mut sum = 0;
        for piece in input.chunks(size) {
            match line.read(piece, 16) {
                Verdict::Pings(pings) => sum += pings,
                Verdict::Unknown(pings) => return Verdict::Unknown(sum + pings),
                Verdict::TooLong(pings) => return Verdict::TooLong(sum + pings),
            }
        }
        Verdict::Pings(sum)
    }

    #[test]
    fn pings_count_however_they_are_cut() {
        let input = PING.repeat(20);
        for size in 1..=input.len() {
            assert_eq!(read(&input, size), Verdict::Pings(20), "pieces of {size}");
        }
        assert_eq!(read(b"ping\npi", 3), Verdict::Pings(1));
    }

    #[test]
    fn other_lines_are_refused_where_they_end() {
        for size in 1..=32 {
            assert_eq!(read(b"ping\npong\nping\n", size), Verdict::Unknown(1), "pieces of {size}");
            assert_eq!(read(b"\n", size), Verdict::Unknown(0));
            assert_eq!(read(b"pingping\n", size), Verdict::Unknown(0));
            assert_eq!(read(b"ping\r\n", size), Verdict::Unknown(0));
        }
    }

    #[test]
    fn lines_over_the_limit_are_refused_before_they_end() {
        for size in 1..=32 {
            assert_eq!(read(&[b"ping\n".as_slice(), &[b'x'; 17]].concat(), size), Verdict::TooLong(1));
            assert_eq!(read(&[b'x'; 16], size), Verdict::Pings(0));
        }
    }

    #[test]
    fn answers_in_a_row_are_whole() {
        assert_eq!(&PONGS[..10], b"pong\npong\n");
        assert!(PONGS.ends_with(b"pong\n"));
    }
}
