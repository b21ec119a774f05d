//! RDMA: memory that devices read and write themselves.
//!
//! [`verbs`] loads the verbs library and owns its objects; [`device`] is a NIC with its port, address and memory.

pub mod device;
#[cfg(test)]
pub mod fake;
pub mod verbs;
