//! What happened, as a hash of everything and as text of the last events.

use std::collections::VecDeque;
use std::fmt;

use super::rng::mix;
use crate::clock::Time;

/// Events kept for reading.
const KEPT: usize = 1024;

/// Who did something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Actor {
    /// An event handed to a worker.
    Worker(usize),
    /// A scripted peer.
    Peer(u64),
    /// A worker's kernel; what is named is a connection of the network.
    Ring(usize),
    /// The network, or the test itself.
    Net,
}

/// One thing that happened. Numbers only: text is made when somebody reads it.
#[derive(Clone, Copy, Debug)]
struct Entry {
    at: Time,
    actor: Actor,
    what: &'static str,
    which: u64,
    value: u64,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.at)?;
        match self.actor {
            Actor::Worker(index) => write!(f, "worker {index}")?,
            Actor::Ring(index) => write!(f, "kernel {index}")?,
            Actor::Peer(id) => write!(f, "peer {id}")?,
            Actor::Net => f.write_str("net")?,
        }
        write!(f, " {}", self.what)?;
        // A connection of a worker is named by slot and generation, everything else by a number.
        match self.actor {
            Actor::Worker(_) => write!(f, " {}.{}", self.which >> 32, self.which as u32)?,
            _ => write!(f, " {}", self.which)?,
        }
        write!(f, ": {}", self.value as i64)
    }
}

/// The rolling record.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    hash: u64,
    count: u64,
    last: VecDeque<Entry>,
}

impl Trace {
    /// Notes an event. `which` and `value` are whatever tells one such event from another.
    pub(crate) fn note(&mut self, at: Time, actor: Actor, what: &'static str, which: u64, value: u64) {
        let who = match actor {
            Actor::Worker(index) => index as u64,
            Actor::Ring(index) => (1 << 61) | index as u64,
            Actor::Peer(id) => (1 << 62) | id,
            Actor::Net => 1 << 63,
        };
        for word in [at.as_nanos(), who, hash_bytes(what.as_bytes()), which, value] {
            self.hash = mix(self.hash.rotate_left(5) ^ word);
        }
        self.count += 1;
        if self.last.len() == KEPT {
            self.last.pop_front();
        }
        self.last.push_back(Entry { at, actor, what, which, value });
    }

    /// Adds to the hash what is too long to be noted: the content of data.
    pub(crate) fn note_content(&mut self, bytes: &[u8]) {
        self.hash = mix(self.hash ^ hash_bytes(bytes));
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash ^ self.count
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// The last `n` events, the oldest first.
    pub(crate) fn tail(&self, n: usize) -> Vec<String> {
        let skip = self.last.len().saturating_sub(n);
        self.last.iter().skip(skip).map(Entry::to_string).collect()
    }
}

/// A hash of bytes, eight at a time.
fn hash_bytes(bytes: &[u8]) -> u64 {
    let mut hash = bytes.len() as u64;
    let mut chunks = bytes.chunks_exact(8);
    for chunk in &mut chunks {
        let word = chunk.try_into().map_or(0, u64::from_le_bytes);
        hash = (hash.rotate_left(7) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    for &byte in chunks.remainder() {
        hash = (hash.rotate_left(7) ^ u64::from(byte)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_content_both_count() {
        let note = |order: [u64; 2]| {
            let mut trace = Trace::default();
            for which in order {
                trace.note(Time::ZERO, Actor::Net, "x", which, 0);
            }
            trace
        };
        assert_eq!(note([1, 2]).hash(), note([1, 2]).hash());
        assert_ne!(note([1, 2]).hash(), note([2, 1]).hash());
        let mut other = note([1, 2]);
        other.note_content(b"abc");
        assert_ne!(other.hash(), note([1, 2]).hash());
    }

    #[test]
    fn the_tail_is_bounded_and_readable() {
        let mut trace = Trace::default();
        for n in 0..2 * KEPT as u64 {
            trace.note(Time::from_nanos(n), Actor::Worker(1), "received", (7 << 32) | 3, n);
        }
        assert_eq!(trace.tail(usize::MAX).len(), KEPT);
        let last = trace.tail(1).pop().expect("one");
        assert_eq!(last, "0.000002s worker 1 received 7.3: 2047");
    }
}
