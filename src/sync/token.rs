//! "It is over", for tasks of one worker.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::{Rc, Weak};

use super::list::List;
use super::notify::Notify;
use crate::task::Hub;

/// Tells tasks of one worker that something is to end; cheap to clone, and all clones are the same.
///
/// Tokens form a tree: cancelling one cancels all that were made of it with [`child`](Self::child), and not those
/// that it was made of. [`of_runtime`](Self::of_runtime) gives one that is cancelled when the runtime is asked to stop.
///
/// ```
/// use corelane::ShutdownToken;
///
/// corelane::task::block_on(async {
///     let token = ShutdownToken::new();
///     let job = token.child();
///     let working = corelane::task::spawn(async move {
///         job.cancelled().await;
///         "tidied up"
///     });
///     token.cancel();
///     assert_eq!(working.await.unwrap(), "tidied up");
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default)]
pub struct ShutdownToken(Rc<Node>);

#[derive(Default)]
struct Node {
    cancelled: Cell<bool>,
    notify: Notify,
    children: RefCell<List<Weak<Node>>>,
    /// Whose child it is, and its place there.
    parent: Option<(Rc<Node>, u32)>,
}

impl ShutdownToken {
    /// A token that only [`cancel`](Self::cancel) cancels.
    pub fn new() -> Self {
        Self::default()
    }

    /// A token that is cancelled when the runtime of this task is asked to stop. Cancelling it stops nothing but those who
    /// wait for this one, its clones and its children.
    ///
    /// # Panics
    /// Outside of a task.
    pub fn of_runtime() -> Self {
        Hub::current().stop_token().child()
    }

    /// A token that is cancelled with this one, or alone.
    pub fn child(&self) -> Self {
        if self.is_cancelled() {
            let child = Self::new();
            child.0.cancelled.set(true);
            return child;
        }
        Self(Rc::new_cyclic(|child| {
            let place = self.0.children.borrow_mut().push_back(child.clone());
            let mut node = Node::default();
            node.parent = Some((self.0.clone(), place));
            node
        }))
    }

    /// Cancels it and its children; those who wait are woken. A second time does nothing.
    pub fn cancel(&self) {
        let mut to_cancel = vec![self.0.clone()];
        let mut cancelled = Vec::new();
        // All of them first, so that nobody who is woken sees one that is about to be.
        while let Some(node) = to_cancel.pop() {
            if node.cancelled.replace(true) {
                continue;
            }
            let children = node.children.borrow();
            let mut at = children.front();
            while let Some(place) = at {
                to_cancel.extend(children.get(place).upgrade());
                at = children.after(place);
            }
            drop(children);
            cancelled.push(node);
        }
        for node in cancelled {
            node.notify.notify_waiters();
        }
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.get()
    }

    /// Waits until it is cancelled; not at all when it is. May be dropped and begun anew at any time, as in a `select`.
    pub async fn cancelled(&self) {
        let notified = self.0.notify.notified();
        if !self.is_cancelled() {
            notified.await;
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some((parent, place)) = &self.parent {
            // The place only: dropping the weak reference frees nothing that anybody could notice.
            drop(parent.children.borrow_mut().take(*place));
        }
    }
}

impl fmt::Debug for ShutdownToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShutdownToken(cancelled: {})", self.is_cancelled())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Bell;
    use super::*;
    use proptest::prelude::*;
    use std::pin::Pin;
    use std::task::Context;

    #[derive(Clone, Debug)]
    enum Step {
        Child(usize),
        Wait(usize),
        Cancel(usize),
        Drop(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => any::<usize>().prop_map(Step::Child),
            3 => any::<usize>().prop_map(Step::Wait),
            1 => any::<usize>().prop_map(Step::Cancel),
            2 => any::<usize>().prop_map(Step::Drop),
        ]
    }

    type Waits = Vec<(usize, Pin<Box<dyn Future<Output = ()>>>, Bell)>;

    proptest! {
        #[test]
        fn a_token_is_cancelled_with_those_it_was_made_of(
            steps in proptest::collection::vec(step(), 0..60),
        ) {
            // All tokens that ever were: the parent's index, whether cancelled in the model.
            let mut tree: Vec<(Option<usize>, bool)> = vec![(None, false)];
            let mut live: Vec<(usize, ShutdownToken)> = vec![(0, ShutdownToken::new())];
            let mut waits: Waits = Vec::new();
            for step in steps {
                match step {
                    Step::Child(which) if !live.is_empty() => {
                        let (parent, token) = &live[which % live.len()];
                        let child = token.child();
                        tree.push((Some(*parent), tree[*parent].1));
                        live.push((tree.len() - 1, child));
                    }
                    Step::Wait(which) if !live.is_empty() => {
                        let (of, token) = &live[which % live.len()];
                        let token = token.clone();
                        let mut future: Pin<Box<dyn Future<Output = ()>>> =
                            Box::pin(async move { token.cancelled().await });
                        let bell = Bell::default();
                        let polled = future.as_mut().poll(&mut Context::from_waker(&bell.waker()));
                        prop_assert_eq!(polled.is_ready(), tree[*of].1);
                        if polled.is_pending() {
                            waits.push((*of, future, bell));
                        }
                    }
                    Step::Cancel(which) if !live.is_empty() => {
                        let (of, token) = &live[which % live.len()];
                        token.cancel();
                        tree[*of].1 = true;
                        // Parents come before their children.
                        for index in 0..tree.len() {
                            if tree[index].0.is_some_and(|parent| tree[parent].1) {
                                tree[index].1 = true;
                            }
                        }
                    }
                    Step::Drop(which) if !live.is_empty() => {
                        live.swap_remove(which % live.len());
                    }
                    _ => {}
                }
                for (of, token) in &live {
                    prop_assert_eq!(token.is_cancelled(), tree[*of].1);
                }
                for (of, _, bell) in &waits {
                    prop_assert_eq!(bell.has_rung(), tree[*of].1);
                }
            }
        }
    }

    #[test]
    fn children_that_are_gone_leave_nothing_behind() {
        let token = ShutdownToken::new();
        for _ in 0..1000 {
            drop(token.child().child());
        }
        let kept = token.child();
        assert_eq!(Rc::weak_count(&kept.0), 1);
        assert_eq!(Rc::weak_count(&token.0), 0);
        assert_eq!(Rc::strong_count(&token.0), 2);
        drop(kept);
        assert!(token.0.children.borrow().is_empty());
    }
}
