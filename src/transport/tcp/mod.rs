//! The TCP transport.
