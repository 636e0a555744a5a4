//! What may lie in the mailbox of a worker that runs tasks.

use std::fmt;

use super::spawner::Order;
use super::waker::TaskName;

/// A message between the workers of a runtime that runs tasks. Nothing of it is for users.
pub struct Message(pub(super) Kind);

pub(super) enum Kind {
    /// Poll a task.
    Wake(TaskName),
    /// Make a task of this.
    Begin(Box<dyn Order>),
    /// Run this among the tasks.
    Run(Box<dyn FnOnce() + Send>),
}

impl Message {
    /// Runs something among the tasks of the worker that it is sent to.
    pub(crate) fn run(run: impl FnOnce() + Send + 'static) -> Self {
        Self(Kind::Run(Box::new(run)))
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Kind::Wake(_) => "Wake",
            Kind::Begin(_) => "Begin",
            Kind::Run(_) => "Run",
        })
    }
}
