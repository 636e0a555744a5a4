//! The pool of equal buffers: who has which.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::arena::{Access, Arena};
use super::guard::{self, Layout};
use super::{Buf, BufMut, BufferConfig, BufferError};

/// Value of a buffer's reference cell while the buffer is free.
const FREE: u32 = 0;
/// Value of a buffer's reference cell while the kernel may write it.
const KERNEL: u32 = u32::MAX;

struct Inner {
    arena: Arena,
    layout: Layout,
    size: u32,
    recv_count: u32,
    /// Per buffer: `FREE`, `KERNEL`, or the number of leases.
    refs: Box<[Cell<u32>]>,
    free_recv: RefCell<Vec<u32>>,
    free_send: RefCell<Vec<u32>>,
    /// Receive buffers that are leased.
    leased_recv: Cell<u32>,
    leased_send: Cell<u32>,
}

/// A worker's buffers; a cheap handle.
#[derive(Clone)]
pub(crate) struct Pool(Rc<Inner>);

impl Pool {
    pub(crate) fn new(config: &BufferConfig) -> Result<Self, BufferError> {
        config.check()?;
        let (arena, layout) = guard::arena(config)?;
        let total = config.count + config.send_count;
        Ok(Self(Rc::new(Inner {
            arena,
            layout,
            size: config.size,
            recv_count: config.count,
            refs: (0..total).map(|_| Cell::new(FREE)).collect(),
            // Reversed, so that low indices are handed out first and untouched pages stay so.
            free_recv: RefCell::new((0..config.count).rev().collect()),
            free_send: RefCell::new((config.count..total).rev().collect()),
            leased_recv: Cell::new(0),
            leased_send: Cell::new(0),
        })))
    }

    /// Number of receive buffers.
    pub(crate) fn capacity(&self) -> u32 {
        self.0.recv_count
    }

    /// Bytes of one buffer.
    pub(crate) fn buffer_size(&self) -> u32 {
        self.0.size
    }

    /// Receive buffers that are not leased: free, or with the kernel and waiting for data.
    #[inline]
    pub(crate) fn available(&self) -> u32 {
        self.0.recv_count - self.0.leased_recv.get()
    }

    /// Send buffers that are free.
    pub(crate) fn sendable(&self) -> u32 {
        self.0.free_send.borrow().len() as u32
    }

    /// Buffers (of both kinds) that leases hold.
    pub(crate) fn leased(&self) -> u32 {
        self.0.leased_recv.get() + self.0.leased_send.get()
    }

    /// Whether every buffer is in one hand: free or leased. True whenever no kernel has any.
    pub(crate) fn is_balanced(&self) -> bool {
        let free = self.0.free_recv.borrow().len() + self.0.free_send.borrow().len();
        free + self.leased() as usize == self.0.refs.len()
    }

    /// The whole arena, for registration with the kernel. `None` in guard mode: the kernel could write to
    /// registered pages whatever their protection.
    pub(crate) fn arena(&self) -> Option<(std::ptr::NonNull<u8>, usize)> {
        (!self.is_guarded()).then(|| (self.0.arena.at(0), self.0.arena.len()))
    }

    /// Whether this is guard mode: buffers in nobody's hand cannot be accessed.
    pub(crate) fn is_guarded(&self) -> bool {
        self.0.layout.is_guarded()
    }

    /// Makes a buffer's pages follow its state, in guard mode.
    #[inline]
    fn set_access(&self, index: u32, access: Access) {
        if self.is_guarded() {
            self.0.layout.set_access(&self.0.arena, index, self.0.size, access);
        }
    }

    /// The memory of buffer `index`.
    #[inline]
    pub(crate) fn address(&self, index: u32) -> std::ptr::NonNull<u8> {
        self.0.arena.at(self.0.layout.first + index as usize * self.0.layout.stride)
    }

    /// Free → Kernel, for every free receive buffer; `each` gets the index. Stops early, and keeps
    /// the buffer free, when `each` says that it has no room.
    #[inline]
    pub(crate) fn lend_all(&self, mut each: impl FnMut(u32) -> bool) -> u32 {
        let mut free = self.0.free_recv.borrow_mut();
        let mut lent = 0;
        while let Some(&index) = free.last() {
            self.set_access(index, Access::ReadWrite);
            if !each(index) {
                self.set_access(index, Access::Nothing);
                break;
            }
            free.pop();
            self.0.refs[index as usize].set(KERNEL);
            lent += 1;
        }
        lent
    }

    /// Free → Kernel, for one receive buffer; `None` when none is free.
    pub(crate) fn lend_one(&self) -> Option<u32> {
        let index = self.0.free_recv.borrow_mut().pop()?;
        self.0.refs[index as usize].set(KERNEL);
        self.set_access(index, Access::ReadWrite);
        Some(index)
    }

    /// Kernel → Leased: the kernel reported `len` bytes in buffer `index`.
    ///
    /// `None` when the buffer is not the kernel's or `len` exceeds it: a completion that lies, which
    /// must not become two owners of one buffer.
    #[inline]
    pub(crate) fn lease(&self, index: u32, len: u32) -> Option<Buf> {
        let cell = self.0.refs.get(index as usize)?;
        if cell.get() != KERNEL || len > self.0.size || index >= self.0.recv_count {
            return None;
        }
        cell.set(1);
        self.0.leased_recv.set(self.0.leased_recv.get() + 1);
        self.set_access(index, Access::Read);
        Some(Buf::first(self.clone(), index, len))
    }

    /// Kernel → Free: the kernel gave the buffer back without data, or will never use it again.
    pub(crate) fn take_back(&self, index: u32) {
        if let Some(cell) = self.0.refs.get(index as usize)
            && cell.get() == KERNEL
        {
            cell.set(FREE);
            self.set_access(index, Access::Nothing);
            self.0.free_recv.borrow_mut().push(index);
        }
    }

    /// Kernel → Free for every buffer that is lent: the way by which they were lent is closed, and no
    /// operation is left that could have taken one before.
    pub(crate) fn take_all_back(&self) {
        (0..self.0.recv_count).for_each(|index| self.take_back(index));
    }

    /// Free → Leased in one step, for drivers that copy into the buffer themselves: `fill` gets the
    /// whole buffer and says how many bytes it wrote. `None` when no buffer is free or `fill` failed.
    pub(crate) fn lease_with(&self, fill: impl FnOnce(&mut [u8]) -> usize) -> Option<Buf> {
        let index = self.0.free_recv.borrow_mut().pop()?;
        let size = self.0.size as usize;
        let address = self.address(index).as_ptr();
        self.set_access(index, Access::ReadWrite);
        // SAFETY: the buffer was Free, so no lease and no kernel operation refers to it, and it is
        // out of the free list for the length of this call (invariant 1).
        let bytes = unsafe { std::slice::from_raw_parts_mut(address, size) };
        let len = fill(bytes).min(size) as u32;
        self.0.refs[index as usize].set(1);
        self.0.leased_recv.set(self.0.leased_recv.get() + 1);
        self.set_access(index, Access::Read);
        Some(Buf::first(self.clone(), index, len))
    }

    /// A send buffer to compose a reply in; `None` when all are in use.
    pub(crate) fn alloc(&self) -> Option<BufMut> {
        let index = self.0.free_send.borrow_mut().pop()?;
        self.0.refs[index as usize].set(1);
        self.0.leased_send.set(self.0.leased_send.get() + 1);
        self.set_access(index, Access::ReadWrite);
        Some(BufMut::first(self.clone(), index))
    }

    /// Whether one lease has this buffer for itself.
    pub(super) fn is_only_lease(&self, index: u32) -> bool {
        self.0.refs[index as usize].get() == 1
    }

    /// The only lease on a buffer is about to change its bytes.
    pub(super) fn allow_writing(&self, index: u32) {
        self.set_access(index, Access::ReadWrite);
    }

    /// A composed buffer is complete: what is leased from now on is only read.
    pub(super) fn end_writing(&self, index: u32) {
        self.set_access(index, Access::Read);
    }

    pub(super) fn add_ref(&self, index: u32) {
        let cell = &self.0.refs[index as usize];
        let refs = cell.get();
        assert!(refs < KERNEL - 1, "more than {} leases of one buffer", KERNEL - 2);
        cell.set(refs + 1);
    }

    #[inline]
    pub(super) fn release(&self, index: u32) {
        let cell = &self.0.refs[index as usize];
        let refs = cell.get() - 1;
        cell.set(refs);
        if refs == FREE {
            self.set_access(index, Access::Nothing);
            if index < self.0.recv_count {
                self.0.leased_recv.set(self.0.leased_recv.get() - 1);
                self.0.free_recv.borrow_mut().push(index);
            } else {
                self.0.leased_send.set(self.0.leased_send.get() - 1);
                self.0.free_send.borrow_mut().push(index);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(count: u32) -> Pool {
        Pool::new(&BufferConfig { size: 64, count, send_count: 1, guard: false }).expect("a small pool")
    }

    fn received(pool: &Pool, bytes: &[u8]) -> Buf {
        pool.lease_with(|room| {
            room[..bytes.len()].copy_from_slice(bytes);
            bytes.len()
        })
        .expect("a free buffer")
    }

    #[test]
    fn a_buffer_returns_when_its_last_lease_is_dropped() {
        let pool = pool(1);
        let whole = received(&pool, b"hello world");
        let part = whole.slice(6..);
        assert_eq!(pool.available(), 0);
        drop(whole);
        assert_eq!(&*part, b"world");
        assert_eq!(pool.available(), 0);
        drop(part);
        assert_eq!(pool.available(), 1);
        assert_eq!(pool.leased(), 0);
    }

    #[test]
    fn a_lying_completion_never_makes_a_second_owner() {
        let pool = pool(2);
        assert!(pool.lease(0, 10).is_none(), "a free buffer is not the kernel's");
        assert_eq!(pool.lend_all(|_| true), 2);
        assert!(pool.lease(0, 65).is_none(), "longer than the buffer");
        assert!(pool.lease(2, 1).is_none(), "a send buffer was never lent");
        assert!(pool.lease(99, 1).is_none());
        let lease = pool.lease(0, 10).expect("lent");
        assert!(pool.lease(0, 10).is_none(), "leased already");
        drop(lease);
        pool.take_back(1);
        pool.take_back(1);
        assert_eq!(pool.lend_all(|_| true), 2, "taking back twice frees once");
    }

    #[test]
    fn bytes_can_be_changed_only_by_the_only_lease() {
        let pool = pool(1);
        let mut lease = received(&pool, b"abc");
        let other = lease.clone();
        assert!(lease.get_mut().is_none());
        drop(other);
        lease.get_mut().expect("alone")[0] = b'x';
        assert_eq!(&*lease, b"xbc");
    }

    #[test]
    fn a_detached_lease_keeps_its_bytes_and_frees_its_buffer() {
        let pool = pool(1);
        let mut lease = received(&pool, b"hello world").slice(6..);
        lease.detach();
        assert_eq!(pool.available(), 1);
        assert_eq!(&*lease.slice(1..3), b"or");
        lease.get_mut().expect("alone")[0] = b'W';
        assert_eq!(&*lease, b"World");
    }

    #[test]
    fn a_composed_reply_takes_what_fits() {
        let pool = pool(1);
        let mut reply = pool.alloc().expect("one send buffer");
        assert!(pool.alloc().is_none());
        assert_eq!(reply.put(&[7; 60]), 60);
        assert_eq!(reply.put(&[8; 60]), 4);
        let reply = reply.freeze();
        assert_eq!(reply.len(), 64);
        assert_eq!(reply[59..61], [7, 8]);
        drop(reply);
        assert!(pool.alloc().is_some());
    }

    #[test]
    fn a_refused_configuration_names_field_value_and_range() {
        let refused = BufferConfig { size: 32, ..BufferConfig::default() }.check();
        let text = refused.expect_err("too small").to_string();
        assert!(text.contains("size 32") && text.contains("64 to 1048576"), "{text}");
    }
}
