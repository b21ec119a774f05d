//! RDMA: memory that devices read and write themselves.
//!
//! [`verbs`] loads the verbs library and owns its objects.

pub mod verbs;
