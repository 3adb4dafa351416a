//! Fair queueing of requests with one flow per user: a simple form of Kubernetes' API Priority and Fairness.
//!
//! Two limits apply to a request. While its body arrives, it counts as an upload of its user; its bytes count until it is
//! answered. A slow upload holds no seat. When the body is complete, the request needs one of the server's seats. If all seats
//! are taken, it waits in the queue of its user, and the next free seat goes to the user with the fewest seats. A user with too
//! many uploads, too many bytes or too long a queue gets 429. A request that waits too long gets 429 too.
//!
//! Guarantees: a user waits at most for the running requests of other users, never for their queues.
//!
//! Caveats: every seat counts the same, however expensive its request. Watches and pod streams hold no seat once they are open.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use apimachinery::status::Status;
use tokio::sync::oneshot;

/// The limits of the queue.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests that run at the same time; kube-apiserver's default.
    pub seats: usize,
    /// Waiting requests of one user.
    pub queued_per_user: usize,
    /// Arriving bodies of one user.
    pub uploads_per_user: usize,
    /// Bytes of one user's bodies, from arrival until the requests are answered.
    pub bytes_per_user: usize,
    /// Maximum time that a request waits for a seat.
    pub queue_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            seats: 400,
            queued_per_user: 200,
            uploads_per_user: 1000,
            bytes_per_user: 32 << 20,
            queue_timeout: Duration::from_secs(15),
        }
    }
}

/// The seats, and the requests that wait for one.
pub struct FairQueue {
    limits: Limits,
    flows: Mutex<Flows>,
}

impl fmt::Debug for FairQueue {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("FairQueue")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Flows {
    seated: usize,
    arrivals: u64,
    users: HashMap<Arc<str>, Flow>,
}

/// The requests of one user.
#[derive(Default)]
struct Flow {
    seated: usize,
    uploads: usize,
    bytes: usize,
    waiting: VecDeque<Waiter>,
}

struct Waiter {
    arrival: u64,
    seat: oneshot::Sender<Seat>,
}

impl Flow {
    fn is_idle(&self) -> bool {
        self.seated == 0 && self.uploads == 0 && self.bytes == 0 && self.waiting.is_empty()
    }
}

impl Flows {
    fn flow(&mut self, user: &str) -> (Arc<str>, &mut Flow) {
        let user: Arc<str> = match self.users.get_key_value(user) {
            Some((user, _)) => user.clone(),
            None => Arc::from(user),
        };
        let flow = self.users.entry(user.clone()).or_default();
        (user, flow)
    }

    fn remove_if_idle(&mut self, user: &str) {
        if self.users.get(user).is_some_and(Flow::is_idle) {
            self.users.remove(user);
        }
    }

    fn vacate(&mut self, user: &str) {
        self.seated = self.seated.saturating_sub(1);
        if let Some(flow) = self.users.get_mut(user) {
            flow.seated = flow.seated.saturating_sub(1);
        }
        self.remove_if_idle(user);
    }

    /// The next waiter: of the user with the fewest seats, and among equal users the earliest.
    fn next(&mut self) -> Option<(Arc<str>, oneshot::Sender<Seat>)> {
        let waiting = self.users.iter().filter_map(|(user, flow)| {
            let first = flow.waiting.front()?;
            Some(((flow.seated, first.arrival), user))
        });
        let user = waiting.min_by_key(|(rank, _)| *rank)?.1.clone();
        let flow = self.users.get_mut(&user)?;
        let waiter = flow.waiting.pop_front()?;
        flow.seated += 1;
        self.seated += 1;
        Some((user, waiter.seat))
    }
}

fn too_many() -> Status {
    Status::too_many_requests("too many requests, please try again later", 1)
}

impl FairQueue {
    /// An empty queue.
    pub fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            flows: Mutex::default(),
        })
    }

    fn flows(&self) -> MutexGuard<'_, Flows> {
        self.flows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a body that starts to arrive.
    pub fn upload(self: &Arc<Self>, user: &str) -> Result<Upload, Status> {
        let mut flows = self.flows();
        let (user, flow) = flows.flow(user);
        if flow.uploads >= self.limits.uploads_per_user {
            return Err(too_many());
        }
        flow.uploads += 1;
        Ok(Upload {
            queue: self.clone(),
            user,
            arriving: true,
            bytes: 0,
        })
    }

    /// Waits for a seat.
    pub async fn seat(self: &Arc<Self>, user: &str) -> Result<Seat, Status> {
        let waiter = match self.enter(user)? {
            Entered::Seated(seat) => return Ok(seat),
            Entered::Queued(waiter) => waiter,
        };
        match tokio::time::timeout(self.limits.queue_timeout, waiter).await {
            Ok(Ok(seat)) => Ok(seat),
            Ok(Err(_)) | Err(_) => Err(too_many()),
        }
    }

    fn enter(self: &Arc<Self>, user: &str) -> Result<Entered, Status> {
        let mut flows = self.flows();
        let free = flows.seated < self.limits.seats;
        flows.arrivals += 1;
        let arrival = flows.arrivals;
        let (user, flow) = flows.flow(user);
        if free {
            flow.seated += 1;
            flows.seated += 1;
            return Ok(Entered::Seated(Seat {
                queue: Some(self.clone()),
                user,
            }));
        }
        // Removes clients that have disconnected.
        flow.waiting.retain(|waiter| !waiter.seat.is_closed());
        if flow.waiting.len() >= self.limits.queued_per_user {
            return Err(too_many());
        }
        let (seat, taken) = oneshot::channel();
        flow.waiting.push_back(Waiter { arrival, seat });
        Ok(Entered::Queued(taken))
    }

    /// Frees a seat and passes it on to the next waiter that is still connected.
    fn leave(self: &Arc<Self>, user: &str) {
        let mut flows = self.flows();
        flows.vacate(user);
        while let Some((user, waiter)) = flows.next() {
            let seat = Seat {
                queue: Some(self.clone()),
                user,
            };
            let Err(mut unwanted) = waiter.send(seat) else {
                return;
            };
            // Dropping the seat would lock the queue again, which is a deadlock.
            unwanted.queue = None;
            flows.vacate(&unwanted.user);
        }
    }
}

enum Entered {
    Seated(Seat),
    Queued(oneshot::Receiver<Seat>),
}

/// The permission to run one request.
#[derive(Debug)]
pub struct Seat {
    /// The queue that gets the seat back on drop.
    queue: Option<Arc<FairQueue>>,
    user: Arc<str>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(queue) = &self.queue {
            queue.leave(&self.user);
        }
    }
}

/// A body that is arriving, or whose request is not answered yet.
#[derive(Debug)]
pub struct Upload {
    queue: Arc<FairQueue>,
    user: Arc<str>,
    arriving: bool,
    bytes: usize,
}

impl Upload {
    /// Counts bytes that have arrived.
    pub fn charge(&mut self, bytes: usize) -> Result<(), Status> {
        let limit = self.queue.limits.bytes_per_user;
        let mut flows = self.queue.flows();
        let (_, flow) = flows.flow(&self.user);
        if flow.bytes.saturating_add(bytes) > limit {
            return Err(too_many());
        }
        flow.bytes += bytes;
        self.bytes += bytes;
        Ok(())
    }

    /// Marks the body as complete. Its bytes count until the value is dropped.
    pub fn arrived(&mut self) {
        if std::mem::take(&mut self.arriving) {
            let mut flows = self.queue.flows();
            let (_, flow) = flows.flow(&self.user);
            flow.uploads = flow.uploads.saturating_sub(1);
        }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.arrived();
        let mut flows = self.queue.flows();
        let (_, flow) = flows.flow(&self.user);
        flow.bytes = flow.bytes.saturating_sub(self.bytes);
        flows.remove_if_idle(&self.user);
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt, future::BoxFuture};

    use super::*;

    fn queue(seats: usize) -> Arc<FairQueue> {
        FairQueue::new(Limits {
            seats,
            queued_per_user: 3,
            uploads_per_user: 2,
            bytes_per_user: 10,
            queue_timeout: Duration::from_secs(5),
        })
    }

    fn waiting<'a>(
        queue: &'a Arc<FairQueue>,
        user: &'a str,
    ) -> BoxFuture<'a, Result<Seat, Status>> {
        let mut seat = queue.seat(user).boxed();
        assert!(seat.as_mut().now_or_never().is_none(), "{user} has a seat");
        seat
    }

    #[tokio::test]
    async fn a_free_seat_goes_to_the_user_who_has_the_fewest() {
        let queue = queue(2);
        let first = queue.seat("greedy").await.unwrap();
        let second = queue.seat("greedy").await.unwrap();
        let more = waiting(&queue, "greedy");
        let calm = waiting(&queue, "calm");
        drop(first);
        let calm = calm.await.unwrap();
        drop(second);
        more.await.unwrap();
        drop(calm);
        assert!(queue.flows().users.is_empty(), "idle users are removed");
        assert_eq!(queue.flows().seated, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn queues_are_bounded_in_length_and_time_and_per_user() {
        let queue = queue(1);
        let held = queue.seat("greedy").await.unwrap();
        let queued: Vec<_> = (0..3).map(|_| waiting(&queue, "greedy")).collect();
        assert_eq!(queue.seat("greedy").await.unwrap_err().code, 429);
        let calm = waiting(&queue, "calm");
        assert_eq!(calm.await.unwrap_err().code, 429, "after the timeout");
        drop(queued);
        let next = waiting(&queue, "greedy");
        drop(held);
        next.await.unwrap();
    }

    #[tokio::test]
    async fn the_seat_of_a_disconnected_client_goes_to_the_next() {
        let queue = queue(1);
        let held = queue.seat("a").await.unwrap();
        let gone = waiting(&queue, "b");
        let next = waiting(&queue, "c");
        drop(gone);
        drop(held);
        drop(next.await.unwrap());
        assert!(queue.flows().users.is_empty());
        assert_eq!(queue.flows().seated, 0);
    }

    #[test]
    fn uploads_are_bounded_per_user_and_take_no_seat() {
        let queue = queue(1);
        let mut uploads = [queue.upload("slow").unwrap(), queue.upload("slow").unwrap()];
        assert_eq!(queue.upload("slow").unwrap_err().code, 429);
        queue.upload("other").unwrap().charge(10).unwrap();
        uploads[0].charge(6).unwrap();
        uploads[0].arrived();
        queue.upload("slow").unwrap().charge(4).unwrap();
        assert_eq!(
            uploads[1].charge(5).unwrap_err().code,
            429,
            "bytes count until the end"
        );
        assert_eq!(queue.flows().seated, 0);
        drop(uploads);
        assert!(queue.flows().users.is_empty());
    }
}
