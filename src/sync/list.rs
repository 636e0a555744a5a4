//! A list whose entries keep their number: what every queue of waiters here is made of.

const NONE: u32 = u32::MAX;

struct Entry<T> {
    prev: u32,
    next: u32,
    is_linked: bool,
    /// `None` in an entry that is free; then `next` leads to the next free one.
    value: Option<T>,
}

/// A doubly linked list in a vector: every operation takes the same time however long it is, and entries are used
/// again, so that a list which has been as long before allocates nothing.
pub(crate) struct List<T> {
    entries: Vec<Entry<T>>,
    first: u32,
    last: u32,
    free: u32,
}

impl<T> Default for List<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), first: NONE, last: NONE, free: NONE }
    }
}

impl<T> List<T> {
    /// Adds an entry at the end; returns its number, which is its own until it is [taken](Self::take).
    pub(crate) fn push_back(&mut self, value: T) -> u32 {
        let entry = Entry { prev: self.last, next: NONE, is_linked: true, value: Some(value) };
        let number = self.free;
        let number = if number == NONE {
            self.entries.push(entry);
            self.entries.len() as u32 - 1
        } else {
            self.free = self.entries[number as usize].next;
            self.entries[number as usize] = entry;
            number
        };
        match self.last {
            NONE => self.first = number,
            last => self.entries[last as usize].next = number,
        }
        self.last = number;
        number
    }

    /// The entry that has been in the list longest.
    pub(crate) fn front(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    /// The entry behind another one that is in the list.
    pub(crate) fn after(&self, number: u32) -> Option<u32> {
        let next = self.entries[number as usize].next;
        (next != NONE).then_some(next)
    }

    /// What an entry holds.
    ///
    /// # Panics
    /// When there is none of that number; so does [`get_mut`](Self::get_mut).
    pub(crate) fn get(&self, number: u32) -> &T {
        self.entries[number as usize].value.as_ref().expect("an entry is there until it is taken")
    }

    /// What an entry holds.
    pub(crate) fn get_mut(&mut self, number: u32) -> &mut T {
        self.entries[number as usize].value.as_mut().expect("an entry is there until it is taken")
    }

    /// Takes an entry out of the order. It keeps its number and what it holds.
    pub(crate) fn unlink(&mut self, number: u32) {
        let entry = &mut self.entries[number as usize];
        if !std::mem::take(&mut entry.is_linked) {
            return;
        }
        let (prev, next) = (entry.prev, entry.next);
        match prev {
            NONE => self.first = next,
            prev => self.entries[prev as usize].next = next,
        }
        match next {
            NONE => self.last = prev,
            next => self.entries[next as usize].prev = prev,
        }
    }

    /// Ends an entry, wherever it is.
    pub(crate) fn take(&mut self, number: u32) -> T {
        self.unlink(number);
        let entry = &mut self.entries[number as usize];
        let value = entry.value.take().expect("an entry is there until it is taken");
        entry.next = std::mem::replace(&mut self.free, number);
        value
    }

    /// Whether nothing is in the order.
    pub(crate) fn is_empty(&self) -> bool {
        self.first == NONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Push,
        Unlink(usize),
        Take(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => Just(Step::Push),
            1 => any::<usize>().prop_map(Step::Unlink),
            2 => any::<usize>().prop_map(Step::Take),
        ]
    }

    proptest! {
        /// The order of those in it, and the values of all, are those of two plain vectors.
        #[test]
        fn a_list_is_what_a_vector_is(steps in proptest::collection::vec(step(), 0..120)) {
            let mut list = List::default();
            let mut ordered: Vec<u32> = Vec::new();
            let mut all: Vec<(u32, u64)> = Vec::new();
            let mut longest = 0;
            for (value, step) in (0u64..).zip(steps) {
                match step {
                    Step::Push => {
                        let number = list.push_back(value);
                        prop_assert!(all.iter().all(|(other, _)| *other != number));
                        ordered.push(number);
                        all.push((number, value));
                        longest = longest.max(all.len());
                    }
                    Step::Unlink(which) if !all.is_empty() => {
                        let (number, _) = all[which % all.len()];
                        list.unlink(number);
                        ordered.retain(|other| *other != number);
                    }
                    Step::Take(which) if !all.is_empty() => {
                        let (number, value) = all.remove(which % all.len());
                        prop_assert_eq!(list.take(number), value);
                        ordered.retain(|other| *other != number);
                    }
                    Step::Unlink(_) | Step::Take(_) => {}
                }
                let mut walked = Vec::new();
                let mut at = list.front();
                while let Some(number) = at {
                    walked.push(number);
                    at = list.after(number);
                }
                prop_assert_eq!(&walked, &ordered);
                prop_assert_eq!(list.is_empty(), ordered.is_empty());
                for (number, value) in &mut all {
                    prop_assert_eq!(list.get(*number), &*value);
                    prop_assert_eq!(list.get_mut(*number), value);
                }
                prop_assert_eq!(list.entries.len(), longest, "entries are used again");
            }
        }
    }
}
