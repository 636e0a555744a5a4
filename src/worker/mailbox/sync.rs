//! What mailboxes are made of: the real parts, or, under `--cfg loom`, the same ones built on loom's atomics,
//! so that `model.rs` can run the mailbox itself through every interleaving.

#[cfg(not(all(test, loom)))]
mod real {
    pub(crate) use crossbeam_queue::ArrayQueue;
    pub(crate) use std::sync::OnceLock;
    pub(crate) use std::sync::atomic::AtomicBool;
}

#[cfg(not(all(test, loom)))]
pub(super) use real::*;

#[cfg(all(test, loom))]
mod modelled {
    use std::sync::Mutex;
    use std::sync::atomic::Ordering;

    pub(crate) use loom::sync::atomic::AtomicBool;
    use loom::sync::atomic::{AtomicUsize, fence};

    /// A value that is set once. Loom decides whether a thread sees that it was; the value itself never
    /// changes.
    pub(crate) struct OnceLock<T> {
        is_set: AtomicBool,
        value: std::sync::OnceLock<T>,
    }

    impl<T> OnceLock<T> {
        pub(crate) fn new() -> Self {
            Self { is_set: AtomicBool::new(false), value: std::sync::OnceLock::new() }
        }

        pub(crate) fn set(&self, value: T) -> Result<(), T> {
            let result = self.value.set(value);
            self.is_set.store(true, Ordering::Release);
            result
        }

        pub(crate) fn get(&self) -> Option<&T> {
            if self.is_set.load(Ordering::Acquire) { self.value.get() } else { None }
        }
    }

    /// `crossbeam_queue::ArrayQueue` 0.3, operation by operation and with its orderings. The values are
    /// behind locks that nobody ever waits for: that a slot's stamp protects its value is crossbeam's
    /// proof, not this one.
    pub(crate) struct ArrayQueue<T> {
        slots: Box<[Slot<T>]>,
        one_lap: usize,
        head: AtomicUsize,
        tail: AtomicUsize,
    }

    struct Slot<T> {
        stamp: AtomicUsize,
        value: Mutex<Option<T>>,
    }

    impl<T> Slot<T> {
        fn replace(&self, value: Option<T>) -> Option<T> {
            std::mem::replace(&mut *self.value.lock().expect("nobody panics with it"), value)
        }
    }

    impl<T> ArrayQueue<T> {
        pub(crate) fn new(capacity: usize) -> Self {
            let slot = |index| Slot { stamp: AtomicUsize::new(index), value: Mutex::new(None) };
            Self {
                slots: (0..capacity).map(slot).collect(),
                one_lap: (capacity + 1).next_power_of_two(),
                head: AtomicUsize::new(0),
                tail: AtomicUsize::new(0),
            }
        }

        pub(crate) fn capacity(&self) -> usize {
            self.slots.len()
        }

        fn slot(&self, position: usize) -> &Slot<T> {
            &self.slots[position & (self.one_lap - 1)]
        }

        /// The position behind `position`.
        fn next(&self, position: usize) -> usize {
            let (index, lap) = (position & (self.one_lap - 1), position & !(self.one_lap - 1));
            if index + 1 < self.slots.len() { position + 1 } else { lap.wrapping_add(self.one_lap) }
        }

        fn push_or_else(
            &self,
            mut value: T,
            full: impl Fn(T, usize, usize, &Slot<T>) -> Result<T, T>,
        ) -> Result<(), T> {
            let mut tail = self.tail.load(Ordering::Relaxed);
            loop {
                let (slot, next) = (self.slot(tail), self.next(tail));
                let stamp = slot.stamp.load(Ordering::Acquire);
                if tail == stamp {
                    match self.tail.compare_exchange(tail, next, Ordering::SeqCst, Ordering::Relaxed) {
                        Ok(_) => {
                            slot.replace(Some(value));
                            slot.stamp.store(tail + 1, Ordering::Release);
                            return Ok(());
                        }
                        Err(now) => tail = now,
                    }
                    continue;
                }
                if stamp.wrapping_add(self.one_lap) == tail + 1 {
                    fence(Ordering::SeqCst);
                    value = full(value, tail, next, slot)?;
                }
                loom::thread::yield_now();
                tail = self.tail.load(Ordering::Relaxed);
            }
        }

        pub(crate) fn push(&self, value: T) -> Result<(), T> {
            self.push_or_else(value, |value, tail, _, _| {
                let head = self.head.load(Ordering::Relaxed);
                if head.wrapping_add(self.one_lap) == tail { Err(value) } else { Ok(value) }
            })
        }

        pub(crate) fn force_push(&self, value: T) -> Option<T> {
            let pushed = self.push_or_else(value, |value, tail, next, slot| {
                let (head, after) = (tail.wrapping_sub(self.one_lap), next.wrapping_sub(self.one_lap));
                match self.head.compare_exchange(head, after, Ordering::SeqCst, Ordering::Relaxed) {
                    Ok(_) => {
                        self.tail.store(next, Ordering::SeqCst);
                        let oldest = slot.replace(Some(value)).expect("a full queue has no empty slot");
                        slot.stamp.store(tail + 1, Ordering::Release);
                        Err(oldest)
                    }
                    Err(_) => Ok(value),
                }
            });
            pushed.err()
        }

        pub(crate) fn pop(&self) -> Option<T> {
            let mut head = self.head.load(Ordering::Relaxed);
            loop {
                let slot = self.slot(head);
                let stamp = slot.stamp.load(Ordering::Acquire);
                if head + 1 == stamp {
                    let next = self.next(head);
                    match self.head.compare_exchange(head, next, Ordering::SeqCst, Ordering::Relaxed) {
                        Ok(_) => {
                            let value = slot.replace(None).expect("a stamped slot has a value");
                            slot.stamp.store(head.wrapping_add(self.one_lap), Ordering::Release);
                            return Some(value);
                        }
                        Err(now) => head = now,
                    }
                    continue;
                }
                if stamp == head {
                    fence(Ordering::SeqCst);
                    if self.tail.load(Ordering::Relaxed) == head {
                        return None;
                    }
                }
                loom::thread::yield_now();
                head = self.head.load(Ordering::Relaxed);
            }
        }
    }
}

#[cfg(all(test, loom))]
pub(super) use modelled::*;
