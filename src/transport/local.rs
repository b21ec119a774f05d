//! Transfers within this process.
