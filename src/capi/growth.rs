//! Structs that later versions may have made larger, and earlier ones smaller, than this library knows them.
//!
//! The rule, in one place: sizes from that of the first version up to [`MAXIMUM`] are accepted. Of an input,
//! missing fields read as zero, which means their default, and unknown bytes must be zero. Of an output,
//! fields that the caller's struct lacks are not written, and unknown bytes are set to zero. Structs are
//! copied bytewise, so they need no alignment.

use std::mem::MaybeUninit;

use crate::capi::guard;
use crate::error::Result;

/// Larger sizes are taken for garbage: no struct will come near it, and the unknown part of one is read.
const MAXIMUM: usize = 4096;

/// A struct of C that may grow at its end.
///
/// # Safety
/// All zeros must be a valid value, and so must any bytes that a C program puts into its fields. Functions
/// that take no size from their caller need a `size_t struct_size` as the first field.
pub unsafe trait Growing: Copy {
    /// Its size in the first version that was released.
    const FIRST_VERSION: usize;
}

/// Reads an options struct; all zeros for NULL.
///
/// # Safety
/// `options` must be NULL or begin with a `struct_size`, and have as many bytes.
pub unsafe fn read_options<T: Growing>(options: *const T) -> Result<T> {
    if options.is_null() {
        return Ok(zeroed());
    }
    // SAFETY: the struct begins with its size, and has as many bytes.
    unsafe {
        let size = read_size(options);
        check_size::<T>(size, || "options->struct_size".to_owned())?;
        read(options, size, || "options".to_owned())
    }
}

/// The size that the caller wrote into an output struct.
///
/// # Safety
/// `output` must be NULL or begin with a `struct_size`.
pub unsafe fn output_size<T: Growing>(output: *mut T, name: &str) -> Result<usize> {
    if output.is_null() {
        return Err(guard::invalid(format!("{name} is NULL")));
    }
    // SAFETY: the struct begins with its size.
    let size = unsafe { read_size(output) };
    check_size::<T>(size, || format!("{name}->struct_size"))?;
    Ok(size)
}

/// Writes an output struct of `size` bytes.
///
/// # Safety
/// `output` must have `size` bytes.
pub unsafe fn write<T: Growing>(output: *mut T, size: usize, value: &T) {
    let known = size.min(size_of::<T>());
    // SAFETY: the output has `size` bytes, and `value` as many as are copied.
    unsafe {
        std::ptr::copy_nonoverlapping((&raw const *value).cast::<u8>(), output.cast(), known);
        std::ptr::write_bytes(output.cast::<u8>().add(known), 0, size - known);
    }
}

/// Checks an array of structs, as far as can be without touching it.
pub fn check_array<T: Growing>(array: *const T, element_size: usize, count: usize, name: &str) -> Result<()> {
    check_size::<T>(element_size, || format!("the element size of {name}"))?;
    guard::check_array(array.cast::<u8>(), element_size, count, name)
}

/// Reads an array of structs, element by element.
///
/// # Safety
/// `array` must have `count` elements of `element_size` bytes, while the iterator lives.
pub unsafe fn read_array<T: Growing>(
    array: *const T,
    element_size: usize,
    count: usize,
    name: &str,
) -> Result<impl Iterator<Item = Result<T>>> {
    check_array(array, element_size, count, name)?;
    Ok((0..count).map(move |index| {
        // SAFETY: the array has this element.
        unsafe { read(array.byte_add(index * element_size), element_size, || format!("{name}[{index}]")) }
    }))
}

/// Writes an element of an array of structs.
///
/// # Safety
/// `array` must have an element number `index`, of `element_size` bytes.
pub unsafe fn write_element<T: Growing>(array: *mut T, element_size: usize, index: usize, value: &T) {
    // SAFETY: as for this function.
    unsafe { write(array.byte_add(index * element_size), element_size, value) }
}

fn zeroed<T: Growing>() -> T {
    // SAFETY: all zeros are a valid value of a growing struct.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// # Safety
/// The struct must begin with its size.
unsafe fn read_size<T: Growing>(structure: *const T) -> usize {
    // SAFETY: as for this function.
    unsafe { structure.cast::<usize>().read_unaligned() }
}

/// `name` is asked for in case of an error only: calls of some tens of nanoseconds come here.
fn check_size<T: Growing>(size: usize, name: impl FnOnce() -> String) -> Result<()> {
    const { assert!(T::FIRST_VERSION <= size_of::<T>() && size_of::<T>() <= MAXIMUM) };
    if (T::FIRST_VERSION..=MAXIMUM).contains(&size) {
        return Ok(());
    }
    Err(guard::invalid(format!(
        "{} is {size}; it must be sizeof the struct, which is {} here and at least {}",
        name(),
        size_of::<T>(),
        T::FIRST_VERSION
    )))
}

/// # Safety
/// The struct must have `size` bytes.
#[inline]
unsafe fn read<T: Growing>(structure: *const T, size: usize, name: impl FnOnce() -> String) -> Result<T> {
    if size == size_of::<T>() {
        // SAFETY: the struct has as many bytes, and they are a valid value by the contract of `Growing`.
        return Ok(unsafe { structure.read_unaligned() });
    }
    // SAFETY: as for this function.
    unsafe { read_other_version(structure, size, name) }
}

/// # Safety
/// The struct must have `size` bytes.
#[cold]
unsafe fn read_other_version<T: Growing>(structure: *const T, size: usize, name: impl FnOnce() -> String) -> Result<T> {
    let known = size.min(size_of::<T>());
    let mut value = zeroed::<T>();
    // SAFETY: the struct has `size` bytes, `value` as many as are copied, and it stays valid by the contract of `Growing`.
    let tail = unsafe {
        std::ptr::copy_nonoverlapping(structure.cast::<u8>(), (&raw mut value).cast(), known);
        std::slice::from_raw_parts(structure.cast::<u8>().add(known), size - known)
    };
    match tail.iter().position(|byte| *byte != 0) {
        None => Ok(value),
        Some(offset) => Err(guard::invalid(format!(
            "{} asks for something that this version does not know: the byte at offset {} of its {size} is not 0",
            name(),
            known + offset
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Now {
        struct_size: usize,
        first: u64,
        second: u64,
    }

    // SAFETY: the first field is `struct_size`, and any bytes are a valid value.
    unsafe impl Growing for Now {
        const FIRST_VERSION: usize = 16;
    }

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Later {
        now: Now,
        third: u64,
    }

    fn later(third: u64) -> Later {
        Later { now: Now { struct_size: size_of::<Later>(), first: 1, second: 2 }, third }
    }

    #[test]
    fn null_options_are_all_zero() {
        // SAFETY: NULL is allowed.
        let read = unsafe { read_options::<Now>(std::ptr::null()) }.unwrap();
        assert_eq!(read, Now { struct_size: 0, first: 0, second: 0 });
    }

    #[test]
    fn a_smaller_struct_reads_as_zero_where_it_ends() {
        let old: [u64; 3] = [16, 7, 99];
        // SAFETY: the struct has the 16 bytes that it says.
        let read = unsafe { read_options(old.as_ptr().cast::<Now>()) }.unwrap();
        assert_eq!(read, Now { struct_size: 16, first: 7, second: 0 });
    }

    #[test]
    fn a_larger_struct_passes_if_its_tail_is_zero() {
        let (zero, other) = (later(0), later(1 << 40));
        // SAFETY: the structs have the bytes that they say.
        let (zero, other) =
            unsafe { (read_options((&raw const zero).cast::<Now>()), read_options((&raw const other).cast::<Now>())) };
        assert_eq!(zero.unwrap().second, 2);
        let error = other.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains("offset 29 of its 32"), "{error}");
    }

    #[test]
    fn sizes_that_no_version_had_are_refused() {
        for size in [0, 8, 15, MAXIMUM + 1, usize::MAX] {
            let options = Now { struct_size: size, first: 0, second: 0 };
            // SAFETY: no more than the size is read of a struct that is refused.
            let (read, written) = unsafe { (read_options(&options), output_size((&raw const options).cast_mut(), "o")) };
            assert_eq!(read.unwrap_err().code(), Code::InvalidArgument, "{size}");
            assert_eq!(written.unwrap_err().code(), Code::InvalidArgument, "{size}");
            assert!(check_array(&options, size, 1, "array").is_err(), "{size}");
        }
    }

    #[test]
    fn no_name_is_made_for_a_size_that_is_right() {
        check_size::<Now>(size_of::<Now>(), || panic!("asked for")).unwrap();
        let refused = check_size::<Now>(8, || "its name".to_owned()).unwrap_err();
        assert!(refused.message().starts_with("its name is 8"), "{refused}");
    }

    #[test]
    fn an_output_is_written_up_to_its_size_and_zero_beyond() {
        let value = Now { struct_size: 24, first: 5, second: 6 };
        let mut small = [16u64, 0, 77];
        let mut large = later(123);
        // SAFETY: the outputs have as many bytes as are said.
        unsafe {
            write(small.as_mut_ptr().cast::<Now>(), 16, &value);
            write((&raw mut large).cast::<Now>(), 32, &value);
        }
        assert_eq!(small, [24, 5, 77]);
        assert_eq!((large.now, large.third), (value, 0));
    }

    #[test]
    fn arrays_step_by_the_callers_element_size() {
        let mut array = [later(0), later(0), later(9)];
        array[1].now.first = 10;
        let size = size_of::<Later>();
        let first = array.as_mut_ptr().cast::<Now>();
        // SAFETY: the array has three elements of that size.
        let read: Vec<_> = unsafe { read_array(first, size, 3, "array") }.unwrap().collect();
        assert_eq!(read[0].as_ref().unwrap().first, 1);
        assert_eq!(read[1].as_ref().unwrap().first, 10);
        assert!(read[2].as_ref().unwrap_err().message().contains("array[2]"));
        // SAFETY: as above.
        unsafe { write_element(first, size, 2, &Now { struct_size: size, first: 4, second: 5 }) };
        assert_eq!((array[1].now.first, array[2].now.first, array[2].third), (10, 4, 0));
    }

    #[test]
    fn arrays_that_cannot_exist_are_refused() {
        assert!(check_array::<Now>(std::ptr::null(), 24, 0, "array").is_ok());
        assert!(check_array::<Now>(std::ptr::null(), 24, 1, "array").is_err());
        assert!(check_array(&later(0).now, 24, usize::MAX, "array").is_err());
        assert!(check_array(&later(0).now, 24, isize::MAX as usize / 24 + 1, "array").is_err());
    }
}
