//! Pull mode: what was received waits with its connection until the handler takes it.
//!
//! The queue is the same that holds data back from a paused handler, so its buffers can be taken back by
//! copying when others need them ([`reclaim`](super::reconcile)), and a close drops it. Receiving pauses
//! when so much waits, and goes on when most of that was taken.

use crate::buffer::{Buf, Payload};
use crate::handler::Taken;

use super::core::Core;
use super::table::{Flags, Phase};

/// Pieces that may wait: each keeps a whole buffer, however small it is.
const MOST_PIECES: u16 = 32;
/// … and that may wait when receiving goes on.
const FEW_PIECES: u16 = 8;

impl<S, M> Core<S, M> {
    /// Whether so much waits that receiving pauses.
    pub(crate) fn is_backed_up(&self, slot: u32) -> bool {
        let entry = self.table.get(slot);
        if entry.flags.has(Flags::HELD_UP) {
            entry.pieces > FEW_PIECES || entry.held.bytes() > u64::from(self.config.low_water)
        } else {
            entry.pieces >= MOST_PIECES || entry.held.bytes() >= u64::from(self.config.high_water)
        }
    }

    /// The next piece of what was received.
    #[inline]
    pub(crate) fn take(&mut self, slot: u32) -> Taken {
        let entry = self.table.get_mut(slot);
        if let Some(payload) = self.memory.chunks.pop(&mut entry.held) {
            entry.pieces = entry.pieces.saturating_sub(1);
            if entry.flags.has(Flags::HELD_UP) && !self.is_backed_up(slot) {
                self.mark_dirty(slot);
            }
            // Only received leases are held.
            return payload.into_lease().map_or(Taken::Nothing, Taken::Data);
        }
        if !entry.flags.has(Flags::RX_EOF) {
            return Taken::Nothing;
        }
        if entry.flags.has(Flags::TX_FAILED) {
            let reason = entry.reason;
            self.mark_dirty(slot);
            return Taken::Failed(reason);
        }
        if !entry.flags.has(Flags::EOF_TOLD) {
            entry.flags.insert(Flags::EOF_TOLD);
            self.mark_dirty(slot);
        }
        Taken::End
    }

    /// Whether something that was received waits.
    pub(crate) fn has_held(&self, slot: u32) -> bool {
        !self.table.get(slot).held.is_empty()
    }

    /// Another lease on the next piece, which stays where it is.
    pub(crate) fn peek(&self, slot: u32) -> Option<Buf> {
        self.memory.chunks.first(&self.table.get(slot).held)?.into_lease()
    }

    /// Puts a piece that was taken, and is not empty, back to the front; a connection that is being closed does not
    /// take it.
    pub(crate) fn put_back(&mut self, slot: u32, buf: Buf) -> Option<Buf> {
        let entry = self.table.get_mut(slot);
        if entry.phase != Phase::Open {
            return Some(buf);
        }
        // The end comes after it, once more.
        entry.flags.remove(Flags::EOF_TOLD);
        let mut front = crate::buffer::Chain::EMPTY;
        self.memory.chunks.push(&mut front, Payload::from(buf));
        self.memory.chunks.join_front(&mut entry.held, front);
        entry.pieces = entry.pieces.saturating_add(1);
        None
    }
}
