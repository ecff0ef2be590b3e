//! What a model asks of its peers.

use std::time::Duration;

use yunta_comm::{CommError, Group, ReduceOp};

use crate::{ModelError, Plan};

/// The other ranks of a model, as seen from one of them. All ranks call the same operations in
/// the same order.
pub trait Ranks: Send {
    /// Ranks in the world.
    fn size(&self) -> usize;

    /// Adds up the partial sums of the tensor group, in place. The terms are on the grid of
    /// [`linear_partial`](yunta_tensor::Backend::linear_partial): the result is exact.
    ///
    /// # Errors
    /// If a rank is lost (so for all below).
    fn sum(&mut self, partial: &mut [f64]) -> Result<(), CommError>;

    /// Adds up rows of which one rank of the tensor group has values and the others zeros.
    ///
    /// # Errors
    /// As above.
    fn sum_rows(&mut self, rows: &mut [f32]) -> Result<(), CommError>;

    /// Sends activations to the same tensor rank of the next stage.
    ///
    /// # Errors
    /// As above.
    fn send_on(&mut self, x: &[f32]) -> Result<(), CommError>;

    /// Receives activations from the same tensor rank of the previous stage.
    ///
    /// # Errors
    /// As above.
    fn receive(&mut self, x: &mut [f32]) -> Result<(), CommError>;

    /// Brings `counts[rank]` values of each rank of the world to rank 0, one after the other.
    /// Other ranks get nothing.
    ///
    /// # Errors
    /// As above.
    fn gather(&mut self, mine: &[f32], counts: &[usize]) -> Result<Option<Vec<f32>>, CommError>;

    /// Rank 0 sends `message` to all others of the world, which get it in its place. The others
    /// may wait long for it.
    ///
    /// # Errors
    /// As above.
    fn announce(&mut self, message: &mut Vec<u8>) -> Result<(), CommError>;
}

/// A rank without peers.
pub struct Alone;

impl Ranks for Alone {
    fn size(&self) -> usize {
        1
    }
    fn sum(&mut self, _: &mut [f64]) -> Result<(), CommError> {
        Ok(())
    }
    fn sum_rows(&mut self, _: &mut [f32]) -> Result<(), CommError> {
        Ok(())
    }
    fn send_on(&mut self, _: &[f32]) -> Result<(), CommError> {
        Ok(())
    }
    fn receive(&mut self, _: &mut [f32]) -> Result<(), CommError> {
        Ok(())
    }
    fn gather(&mut self, mine: &[f32], _: &[usize]) -> Result<Option<Vec<f32>>, CommError> {
        Ok(Some(mine.to_vec()))
    }
    fn announce(&mut self, _: &mut Vec<u8>) -> Result<(), CommError> {
        Ok(())
    }
}

/// Peers reached through a [`Group`] of all ranks.
pub struct GroupRanks {
    world: Group,
    /// The ranks of this stage.
    stage: Option<Group>,
    /// This rank's place in the pipeline, and where its neighbours are in the world.
    previous: Option<Group>,
    next: Option<Group>,
    step_timeout: Duration,
    idle_timeout: Duration,
}

impl GroupRanks {
    /// Arranges the ranks of a world as the plan has them. Each exchange within a step is bounded
    /// by `step_timeout`; the wait for the next order of rank 0 by `idle_timeout`.
    ///
    /// # Errors
    /// [`ModelError`] if the plan is not one of this world.
    pub fn new(
        mut world: Group,
        plan: &Plan,
        step_timeout: Duration,
        idle_timeout: Duration,
    ) -> Result<Self, ModelError> {
        if world.size() != plan.size() {
            let (size, ranks) = (world.size(), plan.size());
            return Err(ModelError::Cut(format!("a plan of {ranks} ranks for a world of {size}")));
        }
        let shard = plan.shard(world.rank())?;
        let (rank, tensor) = (world.rank(), plan.tensor);
        world.set_timeout(step_timeout);
        let first = shard.stage * tensor;
        let stage = world.split(&(first..first + tensor).collect::<Vec<_>>())?;
        // All ranks split off all pairs of neighbours, so that the groups have the same numbers
        // everywhere; each keeps its own two.
        let (mut previous, mut next) = (None, None);
        for low in 0..plan.size() - tensor {
            let pair = world.split(&[low, low + tensor])?;
            if low == rank {
                next = pair;
            } else if low + tensor == rank {
                previous = pair;
            }
        }
        Ok(Self { world, stage, previous, next, step_timeout, idle_timeout })
    }
}

impl Ranks for GroupRanks {
    fn size(&self) -> usize {
        self.world.size()
    }

    fn sum(&mut self, partial: &mut [f64]) -> Result<(), CommError> {
        self.stage.as_mut().map_or(Ok(()), |g| g.all_reduce(partial, ReduceOp::Sum))
    }

    fn sum_rows(&mut self, rows: &mut [f32]) -> Result<(), CommError> {
        self.stage.as_mut().map_or(Ok(()), |g| g.all_reduce(rows, ReduceOp::Sum))
    }

    fn send_on(&mut self, x: &[f32]) -> Result<(), CommError> {
        self.next.as_mut().map_or(Ok(()), |g| g.send(x, 1))
    }

    fn receive(&mut self, x: &mut [f32]) -> Result<(), CommError> {
        self.previous.as_mut().map_or(Ok(()), |g| g.recv(x, 0))
    }

    fn gather(&mut self, mine: &[f32], counts: &[usize]) -> Result<Option<Vec<f32>>, CommError> {
        let lead = self.world.rank() == 0;
        let mut all = vec![0.0; if lead { counts.iter().sum() } else { 0 }];
        self.world.gather(mine, counts, &mut all, 0)?;
        Ok(lead.then_some(all))
    }

    fn announce(&mut self, message: &mut Vec<u8>) -> Result<(), CommError> {
        if self.world.rank() == 0 {
            return self.world.broadcast_bytes(message, 0);
        }
        self.world.set_timeout(self.idle_timeout);
        let outcome = self.world.broadcast_bytes(message, 0);
        self.world.set_timeout(self.step_timeout);
        outcome
    }
}
