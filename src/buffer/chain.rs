//! Queues of payloads, as linked lists in one slab per worker.
//!
//! A [`Chain`] is a handle of 16 bytes that owns its nodes: it can be moved, split at the front and
//! joined, never copied. That makes "who owns these bytes" a matter of types: a chain that was moved
//! into a driver is out of the worker's reach until the driver gives it back (SAFETY invariant 3).

use std::cell::RefCell;
use std::io::IoSlice;
use std::rc::Rc;

use super::Payload;

const NONE: u32 = u32::MAX;

struct Node {
    payload: Option<Payload>,
    next: u32,
}

/// A queue of payloads; empty costs nothing.
#[derive(Debug)]
pub(crate) struct Chain {
    head: u32,
    tail: u32,
    bytes: u64,
}

impl Chain {
    pub(crate) const EMPTY: Chain = Chain { head: NONE, tail: NONE, bytes: 0 };

    /// Whether no payload is queued. (A queued payload of no bytes counts.)
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.head == NONE
    }

    /// Bytes queued.
    #[inline]
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Moves the whole chain out, leaving an empty one.
    #[inline]
    pub(crate) fn take(&mut self) -> Chain {
        std::mem::replace(self, Chain::EMPTY)
    }
}

impl Default for Chain {
    fn default() -> Self {
        Chain::EMPTY
    }
}

#[derive(Default)]
struct Slab {
    nodes: Vec<Node>,
    /// Nodes not in use, linked by `next`.
    free: Option<u32>,
    used: usize,
}

/// The slab that all chains of one worker live in.
#[derive(Clone, Default)]
pub(crate) struct Chunks(Rc<RefCell<Slab>>);

impl Chunks {
    /// A slab with room for `payloads`; it grows when more wait at a time.
    pub(crate) fn with_capacity(payloads: usize) -> Self {
        let slab = Slab { nodes: Vec::with_capacity(payloads), free: None, used: 0 };
        Self(Rc::new(RefCell::new(slab)))
    }

    /// Appends a payload.
    #[inline]
    pub(crate) fn push(&self, chain: &mut Chain, payload: Payload) {
        let slab = &mut *self.0.borrow_mut();
        let len = payload.len() as u64;
        let index = match slab.free {
            Some(index) => {
                let node = &mut slab.nodes[index as usize];
                slab.free = (node.next != NONE).then_some(node.next);
                node.payload = Some(payload);
                node.next = NONE;
                index
            }
            None => {
                let index = slab.nodes.len() as u32;
                assert!(index < NONE, "more than {NONE} queued payloads in one worker");
                slab.nodes.push(Node { payload: Some(payload), next: NONE });
                index
            }
        };
        slab.used += 1;
        if chain.head == NONE {
            chain.head = index;
        } else {
            slab.nodes[chain.tail as usize].next = index;
        }
        chain.tail = index;
        chain.bytes += len;
    }

    /// Removes the first payload.
    #[inline]
    pub(crate) fn pop(&self, chain: &mut Chain) -> Option<Payload> {
        if chain.head == NONE {
            return None;
        }
        let slab = &mut *self.0.borrow_mut();
        let payload = slab.unlink_first(chain)?;
        chain.bytes -= payload.len() as u64;
        Some(payload)
    }

    /// Another handle on the first payload.
    pub(crate) fn first(&self, chain: &Chain) -> Option<Payload> {
        if chain.head == NONE {
            return None;
        }
        self.0.borrow().nodes[chain.head as usize].payload.clone()
    }

    /// Splits off the first `count` payloads as a chain of their own.
    pub(crate) fn split_front(&self, chain: &mut Chain, count: usize) -> Chain {
        let slab = &mut *self.0.borrow_mut();
        let (mut last, mut taken, mut bytes) = (NONE, 0, 0);
        let mut at = chain.head;
        while at != NONE && taken < count {
            let node = &slab.nodes[at as usize];
            bytes += node.payload.as_ref().map_or(0, |payload| payload.len() as u64);
            last = at;
            at = node.next;
            taken += 1;
        }
        if at == NONE {
            return chain.take();
        }
        if last == NONE {
            return Chain::EMPTY;
        }
        slab.nodes[last as usize].next = NONE;
        let front = Chain { head: chain.head, tail: last, bytes };
        chain.head = at;
        chain.bytes -= bytes;
        front
    }

    /// Puts `front` before `chain`.
    pub(crate) fn join_front(&self, chain: &mut Chain, front: Chain) {
        if front.is_empty() {
            return;
        }
        if chain.is_empty() {
            *chain = front;
            return;
        }
        self.0.borrow_mut().nodes[front.tail as usize].next = chain.head;
        chain.head = front.head;
        chain.bytes += front.bytes;
    }

    /// Drops the first `sent` bytes and every payload that they complete, payloads of no bytes
    /// included.
    pub(crate) fn consume(&self, chain: &mut Chain, mut sent: u64) {
        while chain.head != NONE {
            let slab = &mut *self.0.borrow_mut();
            let Some(first) = slab.nodes[chain.head as usize].payload.as_mut() else { return };
            let len = first.len() as u64;
            if sent < len {
                first.advance(sent as usize);
                chain.bytes -= sent;
                return;
            }
            let done = slab.unlink_first(chain);
            chain.bytes -= len;
            sent -= len;
            drop(done);
        }
        debug_assert_eq!(sent, 0, "more bytes sent than were queued");
    }

    /// Drops every payload.
    #[inline]
    pub(crate) fn clear(&self, mut chain: Chain) {
        while self.pop(&mut chain).is_some() {}
    }

    /// Calls `each` with every payload's bytes, in order.
    #[inline]
    pub(crate) fn for_each(&self, chain: &Chain, mut each: impl FnMut(&[u8])) {
        let slab = self.0.borrow();
        let mut at = chain.head;
        while at != NONE {
            let node = &slab.nodes[at as usize];
            if let Some(payload) = &node.payload {
                each(payload.as_slice());
            }
            at = node.next;
        }
    }

    /// The bytes of a chain of one payload: where they are and how many. They stay there as long as
    /// the payload is in a chain. `None` for other chains.
    #[inline]
    pub(crate) fn only(&self, chain: &Chain) -> Option<(*const u8, usize)> {
        if chain.head == NONE || chain.head != chain.tail {
            return None;
        }
        let slab = self.0.borrow();
        let payload = slab.nodes[chain.head as usize].payload.as_ref()?;
        let bytes = payload.as_slice();
        Some((bytes.as_ptr(), bytes.len()))
    }

    /// Calls `run` with the chain's bytes behind the first `skip`, in order: those of at most `MOST` payloads,
    /// none of them empty.
    #[inline]
    #[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "for the epoll driver"))]
    pub(crate) fn with_slices<const MOST: usize, R>(
        &self,
        chain: &Chain,
        mut skip: u64,
        run: impl FnOnce(&[IoSlice<'_>]) -> R,
    ) -> R {
        let slab = self.0.borrow();
        if chain.head != NONE && chain.head == chain.tail {
            let payload = slab.nodes[chain.head as usize].payload.as_ref();
            let bytes = payload.map_or(&[][..], Payload::as_slice);
            let rest = &bytes[skip.min(bytes.len() as u64) as usize..];
            return if rest.is_empty() { run(&[]) } else { run(&[IoSlice::new(rest)]) };
        }
        let mut slices = [IoSlice::new(&[]); MOST];
        let (mut at, mut len) = (chain.head, 0);
        while at != NONE && len < MOST {
            let node = &slab.nodes[at as usize];
            let bytes = node.payload.as_ref().map_or(&[][..], Payload::as_slice);
            let from = skip.min(bytes.len() as u64);
            skip -= from;
            let rest = &bytes[from as usize..];
            if !rest.is_empty() {
                slices[len] = IoSlice::new(rest);
                len += 1;
            }
            at = node.next;
        }
        run(&slices[..len])
    }

    /// Copies every lease in the chain to the heap, so that its buffers return to the pool.
    /// Returns how many there were.
    pub(crate) fn detach(&self, chain: &mut Chain) -> u32 {
        let slab = &mut *self.0.borrow_mut();
        let (mut at, mut detached) = (chain.head, 0);
        while at != NONE {
            let node = &mut slab.nodes[at as usize];
            if let Some(payload) = &mut node.payload
                && payload.is_pooled()
            {
                payload.detach();
                detached += 1;
            }
            at = node.next;
        }
        detached
    }

    /// Whether any payload keeps a buffer of the arena from others.
    pub(crate) fn has_lease(&self, chain: &Chain) -> bool {
        let slab = self.0.borrow();
        let mut at = chain.head;
        while at != NONE {
            let node = &slab.nodes[at as usize];
            if node.payload.as_ref().is_some_and(Payload::is_pooled) {
                return true;
            }
            at = node.next;
        }
        false
    }

    /// Payloads in all chains.
    pub(crate) fn used(&self) -> usize {
        self.0.borrow().used
    }
}

impl Slab {
    #[inline]
    fn unlink_first(&mut self, chain: &mut Chain) -> Option<Payload> {
        let index = chain.head;
        let node = self.nodes.get_mut(index as usize)?;
        let payload = node.payload.take();
        chain.head = node.next;
        if chain.head == NONE {
            chain.tail = NONE;
        }
        node.next = self.free.unwrap_or(NONE);
        self.free = Some(index);
        self.used -= 1;
        payload
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(chunks: &Chunks, chain: &Chain) -> Vec<u8> {
        let mut all = Vec::new();
        chunks.for_each(chain, |bytes| all.extend_from_slice(bytes));
        assert_eq!(all.len() as u64, chain.bytes());
        all
    }

    fn filled(chunks: &Chunks, parts: &[Vec<u8>]) -> Chain {
        let mut chain = Chain::EMPTY;
        for part in parts {
            chunks.push(&mut chain, Payload::from(part.clone()));
        }
        chain
    }

    proptest! {
        #[test]
        fn consuming_any_split_leaves_exactly_the_rest(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..12),
            cut in 0.0..=1.0f64,
        ) {
            let chunks = Chunks::default();
            let all = parts.concat();
            let cut = (all.len() as f64 * cut) as usize;
            let mut chain = filled(&chunks, &parts);
            chunks.consume(&mut chain, cut as u64);
            prop_assert_eq!(text(&chunks, &chain), &all[cut..]);
            chunks.clear(chain);
            prop_assert_eq!(chunks.used(), 0);
        }

        #[test]
        fn slices_are_what_is_left_behind_any_cut(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..12),
            cut in 0.0..=1.0f64,
        ) {
            let chunks = Chunks::default();
            let all = parts.concat();
            let cut = (all.len() as f64 * cut) as usize;
            let chain = filled(&chunks, &parts);
            let left: Vec<u8> = chunks.with_slices::<12, _>(&chain, cut as u64, |slices| {
                assert!(slices.iter().all(|slice| !slice.is_empty()));
                slices.iter().flat_map(|slice| slice.to_vec()).collect()
            });
            prop_assert_eq!(&left, &all[cut..]);
            let some: Vec<u8> = chunks.with_slices::<2, _>(&chain, cut as u64, |slices| {
                assert!(slices.len() <= 2);
                slices.iter().flat_map(|slice| slice.to_vec()).collect()
            });
            prop_assert_eq!(&some[..], &all[cut..cut + some.len()]);
            chunks.clear(chain);
        }

        #[test]
        fn splitting_and_joining_keeps_the_order(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..12),
            count in 0usize..14,
        ) {
            let chunks = Chunks::default();
            let mut chain = filled(&chunks, &parts);
            let front = chunks.split_front(&mut chain, count);
            let n = count.min(parts.len());
            prop_assert_eq!(text(&chunks, &front), parts[..n].concat());
            prop_assert_eq!(text(&chunks, &chain), parts[n..].concat());
            chunks.join_front(&mut chain, front);
            chunks.push(&mut chain, Payload::from(b"end"));
            prop_assert_eq!(text(&chunks, &chain), [parts.concat(), b"end".to_vec()].concat());
            chunks.clear(chain);
            prop_assert_eq!(chunks.used(), 0);
        }
    }

    #[test]
    fn nodes_are_reused() {
        let chunks = Chunks::default();
        for _ in 0..100 {
            let mut chain = filled(&chunks, &[vec![1], vec![2]]);
            assert_eq!(chunks.pop(&mut chain).expect("first").as_slice(), [1]);
            chunks.clear(chain);
        }
        assert_eq!(chunks.0.borrow().nodes.len(), 2);
    }
}
