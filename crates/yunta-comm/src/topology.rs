//! Which ranks are linked, and by what. All ranks know the same, and so choose alike.

use std::collections::VecDeque;

use crate::Transport;

/// The links of a world: `rows[a][b]` is what carries the link between `a` and `b`, if there is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    rows: Vec<Vec<Option<Transport>>>,
}

impl Topology {
    /// From a square matrix; a link counts if both sides have it.
    pub fn new(rows: Vec<Vec<Option<Transport>>>) -> Self {
        let size = rows.len();
        let at = |a: usize, b: usize| rows.get(a).and_then(|r| r.get(b)).copied().flatten();
        let pair = |a: usize, b: usize| match (at(a, b), at(b, a)) {
            (Some(x), Some(y)) if a != b => Some(x.max(y)),
            _ => None,
        };
        Self { rows: (0..size).map(|a| (0..size).map(|b| pair(a, b)).collect()).collect() }
    }

    /// Every pair linked in the same way.
    pub fn full(size: usize, transport: Transport) -> Self {
        Self::new(vec![vec![Some(transport); size]; size])
    }

    /// Ranks.
    pub fn size(&self) -> usize {
        self.rows.len()
    }

    /// What links two ranks.
    pub fn link(&self, a: usize, b: usize) -> Option<Transport> {
        self.rows.get(a)?.get(b).copied().flatten()
    }

    /// As seen by some of the ranks, in their order.
    pub(crate) fn of(&self, members: &[usize]) -> Self {
        let row = |a: &usize| members.iter().map(|b| self.link(*a, *b)).collect();
        Self { rows: members.iter().map(row).collect() }
    }

    pub(crate) fn is_full(&self) -> bool {
        let n = self.size();
        (0..n).all(|a| (0..n).all(|b| a == b || self.link(a, b).is_some()))
    }

    /// Whether each rank is linked with the next.
    pub(crate) fn is_line(&self) -> bool {
        (1..self.size()).all(|b| self.link(b - 1, b).is_some())
    }

    /// Whether the last rank is linked with the first.
    pub(crate) fn is_closed(&self) -> bool {
        self.size() > 2 && self.link(self.size() - 1, 0).is_some()
    }

    /// The slowest transport there is.
    pub(crate) fn slowest(&self) -> Option<Transport> {
        self.rows.iter().flatten().flatten().max().copied()
    }

    /// A spanning tree of shortest ways to `root`: each rank's parent. `None` if some rank can't be
    /// reached.
    pub(crate) fn tree(&self, root: usize) -> Option<Vec<usize>> {
        let mut parents = vec![None; self.size()];
        *parents.get_mut(root)? = Some(root);
        let mut queue = VecDeque::from([root]);
        while let Some(a) = queue.pop_front() {
            for (b, parent) in parents.iter_mut().enumerate() {
                if parent.is_none() && self.link(a, b).is_some() {
                    *parent = Some(a);
                    queue.push_back(b);
                }
            }
        }
        parents.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_span_what_is_connected() {
        let tcp = Some(Transport::Tcp);
        // 0 - 1 - 2, 3 alone.
        let mut rows = vec![vec![None; 4]; 4];
        for (a, b) in [(0, 1), (1, 2)] {
            rows[a][b] = tcp;
            rows[b][a] = tcp;
        }
        // Known to one side only.
        rows[3][0] = tcp;
        let topology = Topology::new(rows);
        assert_eq!(topology.tree(0), None);
        let three = topology.of(&[2, 1, 0]);
        assert_eq!(three.tree(2), Some(vec![1, 2, 2]));
        assert!(three.is_line() && !three.is_full() && !three.is_closed());
        assert!(!topology.is_line());
        assert!(topology.of(&[0, 1]).is_full());
    }
}
