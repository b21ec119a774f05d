//! Ranges and arrays that C passes.

use std::ffi::c_void;

use crate::capi::guard;
use crate::error::Result;
use crate::sys::MemoryRange;

/// A range of the caller's memory that is to be registered.
///
/// # Safety
/// The caller must own the range, and leave it to the library as long as the function that takes it says.
pub unsafe fn range(address: *mut c_void, length: u64) -> Result<MemoryRange> {
    if address.is_null() {
        return Err(guard::invalid("the address of the memory is NULL"));
    }
    // SAFETY: as for this function.
    unsafe { MemoryRange::new(address as u64, length) }.ok_or_else(|| wraps(address, length))
}

/// The local range of request number `index`, which may be NULL if it is empty.
///
/// # Safety
/// As for [`range`].
pub unsafe fn local_range(address: *mut c_void, length: u64, index: usize) -> Result<MemoryRange> {
    if address.is_null() && length != 0 {
        return Err(guard::invalid(format!("the local address of request {index} is NULL, but its length is {length} bytes")));
    }
    // SAFETY: as for this function.
    unsafe { MemoryRange::new(address as u64, length) }.ok_or_else(|| wraps(address, length))
}

/// The elements of an array of C.
///
/// # Safety
/// `array` must have `count` elements, while the iterator lives.
pub unsafe fn read_array<T: Copy>(array: *const T, count: usize, name: &str) -> Result<impl Iterator<Item = T>> {
    guard::check_array(array, size_of::<T>(), count, name)?;
    // SAFETY: the array has these elements.
    Ok((0..count).map(move |index| unsafe { array.add(index).read_unaligned() }))
}

/// An array of addresses.
///
/// # Safety
/// `addresses` must have `count` elements.
pub unsafe fn read_addresses(addresses: *const *mut c_void, count: usize) -> Result<Vec<u64>> {
    // SAFETY: as for this function.
    Ok(unsafe { read_array(addresses, count, "the array of addresses") }?.map(|address| address as u64).collect())
}

fn wraps(address: *mut c_void, length: u64) -> crate::Error {
    guard::invalid(format!("{length} bytes at {address:p} run past the end of the address space"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_is_no_memory_unless_it_is_empty() {
        let null = std::ptr::null_mut();
        // SAFETY: the ranges are looked at, not used.
        unsafe {
            assert!(range(null, 10).is_err());
            assert!(range(null, 0).is_err());
            assert!(local_range(null, 1, 3).unwrap_err().message().contains("request 3"));
            assert_eq!(local_range(null, 0, 0).unwrap().length(), 0);
        }
    }

    #[test]
    fn ranges_may_end_where_the_address_space_does_but_not_wrap() {
        let last = (u64::MAX - 9) as *mut c_void;
        // SAFETY: the ranges are looked at, not used.
        unsafe {
            assert_eq!(range(last, 10).unwrap().end(), 1 << 64);
            assert!(range(last, 11).is_err());
            assert!(local_range(last, 11, 0).is_err());
        }
    }

    #[test]
    fn an_array_of_nothing_may_be_null() {
        // SAFETY: nothing is read of arrays that are empty or refused.
        unsafe {
            assert!(read_addresses(std::ptr::null(), 0).unwrap().is_empty());
            assert!(read_addresses(std::ptr::null(), 1).is_err());
            assert!(read_addresses([std::ptr::null_mut()].as_ptr(), usize::MAX).is_err());
        }
    }
}
