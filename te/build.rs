//! Compiles the ordered map of C++ that `te bench sweep` measures beside the registry. Without a C++ compiler the sweep does without.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src/bench/sweep/ordered_map.cpp");
    println!("cargo:rustc-check-cfg=cfg(has_ordered_map)");
    let mut build = cc::Build::new();
    // Of its own speed in every profile; and the program shall not need a library of C++ where it runs.
    build.cpp(true).std("c++17").opt_level(2).cpp_link_stdlib_static(true).file("src/bench/sweep/ordered_map.cpp");
    match build.try_compile("ordered_map") {
        Ok(()) => println!("cargo:rustc-cfg=has_ordered_map"),
        Err(error) => println!("cargo:warning=te bench sweep will have no ordered map of C++ to compare with: {error}"),
    }
}
