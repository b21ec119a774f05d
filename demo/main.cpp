// Two engines in two processes: this program starts itself a second time as the target.
#include "roles.hpp"

#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>

int main(int argc, char** argv) {
    bool is_target = argc == 2 && std::strcmp(argv[1], "target") == 0;
    if (argc > 1 && !is_target) {
        std::cerr << "usage: " << argv[0] << "\n";
        return 2;
    }
    // Some transfers are meant to be refused; their warnings would hide the rest.
    setenv("MC_LOG_LEVEL", "ERROR", 0);
    try {
        if (is_target) {
            run_target();
        } else {
            run_initiator();
        }
        return 0;
    } catch (const std::exception& failure) {
        std::cerr << (is_target ? "\ntarget: " : "\nFAILED: ") << failure.what() << std::endl;
        return 1;
    }
}
