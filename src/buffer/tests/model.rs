//! Any history of a pool against a model that is too simple to be wrong: per buffer a state, per lease the
//! bytes that it must show.

use proptest::prelude::*;

use super::*;

const SIZE: u32 = 100;
const RECV: u32 = 4;
const SEND: u32 = 2;

#[derive(Clone, Debug)]
enum Op {
    /// Lends free buffers, this many at most.
    Lend(u32),
    /// The kernel says that so many bytes arrived in a buffer; whether that can be is another matter.
    Arrived(u32, u32),
    TakeBack(u32),
    TakeAllBack,
    Fill(u32),
    Compose(u32),
    /// On one of the leases: share it, change it, copy it to the heap, drop it.
    Slice(usize, u32),
    Change(usize, u8),
    Detach(usize),
    Drop(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let buffer = 0..RECV + SEND + 2;
    prop_oneof![
        (0..RECV + 1).prop_map(Op::Lend),
        (buffer.clone(), 0..SIZE + 2).prop_map(|(index, len)| Op::Arrived(index, len)),
        buffer.prop_map(Op::TakeBack),
        Just(Op::TakeAllBack),
        (0..SIZE + 1).prop_map(Op::Fill),
        (0..SIZE + 1).prop_map(Op::Compose),
        (any::<usize>(), 0..SIZE).prop_map(|(lease, from)| Op::Slice(lease, from)),
        (any::<usize>(), any::<u8>()).prop_map(|(lease, byte)| Op::Change(lease, byte)),
        any::<usize>().prop_map(Op::Detach),
        any::<usize>().prop_map(Op::Drop),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Kernel,
    Leased { leases: u32, changed: bool },
}

struct Lease {
    buf: Buf,
    wanted: Vec<u8>,
    /// Which buffer; none for a copy on the heap.
    index: Option<usize>,
}

struct Model {
    pool: Pool,
    states: Vec<State>,
    leases: Vec<Lease>,
    /// What the next arrival is filled with.
    fill: u8,
}

impl Model {
    fn new(guard: bool) -> Self {
        let states = vec![State::Free; (RECV + SEND) as usize];
        Self { pool: pool(SIZE, RECV, SEND, guard), states, leases: Vec::new(), fill: 0 }
    }

    fn count(&self, range: std::ops::Range<usize>, wanted: impl Fn(State) -> bool) -> u32 {
        self.states[range].iter().filter(|&&state| wanted(state)).count() as u32
    }

    fn receive(&self) -> std::ops::Range<usize> {
        0..RECV as usize
    }

    fn compose(&self) -> std::ops::Range<usize> {
        RECV as usize..(RECV + SEND) as usize
    }

    /// The buffer that a fresh lease begins at.
    fn buffer_of(&self, buf: &Buf) -> usize {
        let begins = |index: &u32| self.pool.address(*index).as_ptr().cast_const() == buf.as_ptr();
        (0..RECV + SEND).find(begins).expect("a lease on a buffer of this pool") as usize
    }

    /// A lease appeared: its buffer must have been in `before`.
    fn keep(&mut self, buf: Buf, before: State) {
        let index = self.buffer_of(&buf);
        assert_eq!(self.states[index], before, "buffer {index} has a second owner");
        self.states[index] = State::Leased { leases: 1, changed: false };
        self.leases.push(Lease { wanted: buf.to_vec(), buf, index: Some(index) });
    }

    fn run(&mut self, op: &Op) {
        self.fill = self.fill.wrapping_add(1);
        let fill = self.fill;
        match *op {
            Op::Lend(most) => {
                let free = self.count(self.receive(), |state| state == State::Free);
                let mut lent = Vec::new();
                let told = self.pool.lend_all(|index| {
                    let room = (lent.len() as u32) < most;
                    if room {
                        lent.push(index as usize);
                    }
                    room
                });
                assert_eq!((told, lent.len() as u32), (free.min(most), free.min(most)));
                for index in lent {
                    assert_eq!(self.states[index], State::Free, "lent buffer {index} twice");
                    self.states[index] = State::Kernel;
                }
            }
            Op::Arrived(index, len) => {
                let state = self.states.get(index as usize).copied();
                if state == Some(State::Kernel) && len <= SIZE {
                    let at = self.pool.address(index).as_ptr();
                    // SAFETY: lent, and this is the kernel: `len` bytes fit, and nobody else looks.
                    unsafe { std::ptr::write_bytes(at, fill, len as usize) };
                    let buf = self.pool.lease(index, len).expect("it was lent");
                    assert_eq!(&buf[..], &vec![fill; len as usize][..]);
                    self.keep(buf, State::Kernel);
                } else {
                    assert!(self.pool.lease(index, len).is_none(), "buffer {index} in {state:?}");
                }
            }
            Op::TakeBack(index) => {
                self.pool.take_back(index);
                if let Some(state @ State::Kernel) = self.states.get_mut(index as usize) {
                    *state = State::Free;
                }
            }
            Op::TakeAllBack => {
                self.pool.take_all_back();
                for state in self.states.iter_mut().filter(|state| **state == State::Kernel) {
                    *state = State::Free;
                }
            }
            Op::Fill(len) => {
                let free = self.count(self.receive(), |state| state == State::Free);
                let buf = self.pool.lease_with(|room| {
                    assert_eq!(room.len(), SIZE as usize);
                    room[..len as usize].fill(fill);
                    len as usize
                });
                assert_eq!(buf.is_some(), free > 0);
                if let Some(buf) = buf {
                    assert_eq!(&buf[..], &vec![fill; len as usize][..]);
                    self.keep(buf, State::Free);
                }
            }
            Op::Compose(len) => {
                let free = self.count(self.compose(), |state| state == State::Free);
                let reply = self.pool.alloc();
                assert_eq!(reply.is_some(), free > 0);
                if let Some(mut reply) = reply {
                    assert_eq!(reply.put(&vec![fill; len as usize]), len as usize);
                    assert_eq!(reply.room(), (SIZE - len) as usize);
                    self.keep(reply.freeze(), State::Free);
                }
            }
            Op::Slice(lease, from) => {
                let Some(at) = self.pick(lease) else { return };
                let Lease { buf, wanted, index } = &self.leases[at];
                let from = (from as usize).min(wanted.len());
                let part = Lease { buf: buf.slice(from..), wanted: wanted[from..].to_vec(), index: *index };
                if let Some(State::Leased { leases, .. }) = part.index.map(|index| &mut self.states[index]) {
                    *leases += 1;
                }
                self.leases.push(part);
            }
            Op::Change(lease, byte) => {
                let Some(at) = self.pick(lease) else { return };
                let Lease { buf, wanted, index } = &mut self.leases[at];
                let alone = match index.map(|index| &mut self.states[index]) {
                    Some(State::Leased { leases: 1, changed }) => {
                        *changed = true;
                        true
                    }
                    Some(_) => false,
                    None => return,
                };
                assert_eq!(buf.get_mut().is_some(), alone, "only the only lease may change bytes");
                if let Some(bytes) = buf.get_mut() {
                    bytes.fill(byte);
                    wanted.fill(byte);
                }
            }
            Op::Detach(lease) => {
                let Some(at) = self.pick(lease) else { return };
                let before = self.leases[at].index.take();
                self.leases[at].buf.detach();
                self.gave_up(before);
            }
            Op::Drop(lease) => {
                let Some(at) = self.pick(lease) else { return };
                let Lease { buf, index, .. } = self.leases.swap_remove(at);
                drop(buf);
                self.gave_up(index);
            }
        }
    }

    fn pick(&self, lease: usize) -> Option<usize> {
        lease.checked_rem(self.leases.len())
    }

    /// One lease less on a buffer.
    fn gave_up(&mut self, index: Option<usize>) {
        let Some(state) = index.map(|index| &mut self.states[index]) else { return };
        match state {
            State::Leased { leases: 2.., .. } => {
                if let State::Leased { leases, .. } = state {
                    *leases -= 1;
                }
            }
            State::Leased { .. } => *state = State::Free,
            other => panic!("a lease on a buffer that is {other:?}"),
        }
    }

    fn check(&self) {
        let is_leased = |state| matches!(state, State::Leased { .. });
        let leased = self.count(self.receive(), is_leased);
        assert_eq!(self.pool.available(), RECV - leased);
        assert_eq!(self.pool.leased(), leased + self.count(self.compose(), is_leased));
        for Lease { buf, wanted, .. } in &self.leases {
            assert_eq!(&buf[..], &wanted[..]);
        }
    }

    /// In guard mode the pages of every buffer are what its state says, from the first byte to the last, and
    /// the byte behind is nobody's.
    #[cfg(unix)]
    fn check_pages(&self) {
        for (index, &state) in self.states.iter().enumerate() {
            let wanted = match state {
                State::Free => Access::Nothing,
                State::Kernel | State::Leased { changed: true, .. } => Access::ReadWrite,
                State::Leased { changed: false, .. } => Access::Read,
            };
            let at = self.pool.address(index as u32).as_ptr();
            assert_eq!(access(at), wanted, "first byte of buffer {index}, {state:?}");
            let last = at.wrapping_add(SIZE as usize - 1);
            assert_eq!(access(last), wanted, "last byte of buffer {index}, {state:?}");
            assert_eq!(access(last.wrapping_add(1)), Access::Nothing, "behind buffer {index}");
        }
    }
}

proptest! {
    #[test]
    fn any_history_leaves_every_buffer_in_one_hand(ops in prop::collection::vec(op(), 0..80)) {
        let mut model = Model::new(false);
        for op in &ops {
            model.run(op);
            model.check();
        }
    }

    #[cfg(unix)]
    #[test]
    fn in_guard_mode_the_pages_follow_the_hand(ops in prop::collection::vec(op(), 0..40)) {
        let mut model = Model::new(true);
        model.check_pages();
        for op in &ops {
            model.run(op);
            model.check();
            model.check_pages();
        }
    }
}
