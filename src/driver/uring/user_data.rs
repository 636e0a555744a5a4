//! The 64 bits that come back with every completion: kind (8) · slot (24) · generation (32).
//!
//! The generation is checked on every completion, so that a late one can never reach the slot's
//! next connection (promise 3).

use crate::driver::{Key, MAX_SLOTS};

/// What an operation was started for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Completions that nobody waits for (a discarded socket's close).
    Ignore = 0,
    AcceptMulti,
    /// The slot is `listener * ONCE_OPS + operation`.
    AcceptOnce,
    Recv,
    /// Waiting until a connection is readable.
    Poll,
    Send,
    Connect,
    /// Putting an outgoing socket into the descriptor table.
    Register,
    Shutdown,
    /// Connecting to nowhere, which resets.
    Disconnect,
    Close,
    /// Reported only when the cancel found nothing.
    CancelRecv,
    /// Likewise, for cancels whose target ends by itself in that case.
    Cancel,
    /// Another thread wrote to the event counter.
    Wake,
    /// Another ring's message.
    PeerWake,
    /// A message to another ring failed; the slot is the peer's number.
    PeerFailed,
    /// The slot is the operation object's number, and the generation that of its use.
    SendDatagram,
    /// Waiting until a datagram socket has room, or for some time where nobody tells.
    Room,
    /// A connection to a Unix socket, which is over before; see `control.rs`.
    UnixConnect,
    /// Giving a socket of the descriptor table an ordinary descriptor; see `control.rs`.
    Install,
}

const KINDS: [Kind; 20] = [
    Kind::Ignore,
    Kind::AcceptMulti,
    Kind::AcceptOnce,
    Kind::Recv,
    Kind::Poll,
    Kind::Send,
    Kind::Connect,
    Kind::Register,
    Kind::Shutdown,
    Kind::Disconnect,
    Kind::Close,
    Kind::CancelRecv,
    Kind::Cancel,
    Kind::Wake,
    Kind::PeerWake,
    Kind::PeerFailed,
    Kind::SendDatagram,
    Kind::Room,
    Kind::UnixConnect,
    Kind::Install,
];

#[inline]
pub(crate) fn encode(kind: Kind, key: Key) -> u64 {
    debug_assert!(key.slot < MAX_SLOTS);
    (kind as u64) << 56 | u64::from(key.slot) << 32 | u64::from(key.generation)
}

/// `None` for a value that this driver never gave out.
#[inline]
pub(crate) fn decode(user_data: u64) -> Option<(Kind, Key)> {
    let kind = *KINDS.get((user_data >> 56) as usize)?;
    let slot = (user_data >> 32) as u32 & (MAX_SLOTS - 1);
    Some((kind, Key { slot, generation: user_data as u32 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_the_way_through_the_kernel() {
        let key = Key { slot: MAX_SLOTS - 1, generation: u32::MAX - 3 };
        for kind in KINDS {
            assert_eq!(decode(encode(kind, key)), Some((kind, key)));
        }
        assert_eq!(decode(u64::MAX), None);
    }
}
