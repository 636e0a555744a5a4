//! The 64 bits that come back with every readiness: kind (8) · slot (24) · generation (32).
//!
//! The generation is checked on every one, so that late readiness can never reach the slot's (or the listener's
//! number's) next use. (It could come for a descriptor that was closed here while a forked child still holds it.)

use crate::driver::{Key, ListenerId, MAX_SLOTS};

/// Whose readiness it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Conn(Key),
    /// A listener, and how many had its number before.
    Listener(ListenerId, u32),
    /// Another thread wrote to the event counter.
    Wake,
}

const CONN: u64 = 1;
const LISTENER: u64 = 2;
const WAKE: u64 = 3;

impl Source {
    #[inline]
    pub(super) fn encode(self) -> u64 {
        match self {
            Self::Conn(key) => {
                debug_assert!(key.slot < MAX_SLOTS);
                CONN << 56 | u64::from(key.slot) << 32 | u64::from(key.generation)
            }
            Self::Listener(id, generation) => LISTENER << 56 | u64::from(id.0) << 32 | u64::from(generation),
            Self::Wake => WAKE << 56,
        }
    }

    /// `None` for what never was a source.
    #[inline]
    pub(super) fn decode(user_data: u64) -> Option<Self> {
        match user_data >> 56 {
            CONN => {
                let slot = (user_data >> 32) as u32 & (MAX_SLOTS - 1);
                Some(Self::Conn(Key { slot, generation: user_data as u32 }))
            }
            LISTENER => Some(Self::Listener(ListenerId((user_data >> 32) as u16), user_data as u32)),
            WAKE => Some(Self::Wake),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_in_comes_out() {
        let conn = |slot, generation| Source::Conn(Key { slot, generation });
        for source in [
            conn(0, 0),
            conn(MAX_SLOTS - 1, u32::MAX),
            conn(7, 1 << 31),
            Source::Listener(ListenerId(0), 0),
            Source::Listener(ListenerId(u16::MAX), u32::MAX),
            Source::Listener(ListenerId(7), 1 << 31),
            Source::Wake,
        ] {
            assert_eq!(Source::decode(source.encode()), Some(source));
        }
        assert_eq!(Source::decode(0), None);
        assert_eq!(Source::decode(u64::MAX), None);
    }
}
