// Checks that end the test with the place and what was there instead.
#pragma once

#include <common/base/status.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <type_traits>

namespace check {

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
    std::cerr << file << ":" << line << ": " << what << std::endl;
    std::_Exit(1);
}

template <class T>
std::string show(const T& value) {
    std::ostringstream text;
    if constexpr (std::is_enum_v<T> && !std::is_convertible_v<T, int>) {
        text << static_cast<long long>(value);
    } else if constexpr (requires { text << value; }) {
        text << value;
    } else {
        text << "something else";
    }
    return text.str();
}

// Whether they are the same number: -1 and 2^64 - 1 are not.
template <class A, class B>
bool equal(const A& a, const B& b) {
    if constexpr (std::is_integral_v<A> && std::is_integral_v<B>) {
        return (a < A{}) == (b < B{}) && static_cast<unsigned long long>(a) == static_cast<unsigned long long>(b);
    } else {
        return a == b;
    }
}

template <class A, class B>
void expect(const char* file, int line, const char* expression, const A& expected, const B& got) {
    if (!equal(expected, got)) fail(file, line, std::string(expression) + " is " + show(got) + ", not " + show(expected));
}

inline void succeed(const char* file, int line, const char* expression, const mooncake::Status& status) {
    if (!status.ok()) fail(file, line, std::string(expression) + ": " + status.ToString());
}

inline void succeed(const char* file, int line, const char* expression, int result) {
    if (result != 0) fail(file, line, std::string(expression) + " is " + std::to_string(result));
}

}  // namespace check

#define REQUIRE(...) ((__VA_ARGS__) ? (void)0 : check::fail(__FILE__, __LINE__, #__VA_ARGS__))
// The expression has exactly this value.
#define EXPECT(expected, ...) check::expect(__FILE__, __LINE__, #__VA_ARGS__, expected, __VA_ARGS__)
// The call answers 0, or a status that is OK.
#define SUCCEEDS(...) check::succeed(__FILE__, __LINE__, #__VA_ARGS__, __VA_ARGS__)
