# What programs that use upstream's headers expect to come along: glog, jsoncpp and libnuma, each where it is found.
#
# For each there is a target TransferEngine::mooncake_<name> and TransferEngine_mooncake_<name>_FOUND. If it is not found, or
# CMAKE_DISABLE_FIND_PACKAGE_<name> is set, the target has the headers do without.

function(_transfer_engine_find name header)
  set(found FALSE)
  set(target TransferEngine::mooncake_${name})
  if(NOT TARGET ${target})
    add_library(${target} INTERFACE IMPORTED)
  endif()
  if(NOT CMAKE_DISABLE_FIND_PACKAGE_${name})
    find_package(${name} CONFIG QUIET)
    foreach(candidate IN LISTS ARGN)
      if(NOT found AND TARGET ${candidate})
        set_target_properties(${target} PROPERTIES INTERFACE_LINK_LIBRARIES ${candidate})
        set(found TRUE)
      endif()
    endforeach()
    if(NOT found)
      find_path(TransferEngine_${name}_INCLUDE_DIR ${header} PATH_SUFFIXES ${name})
      find_library(TransferEngine_${name}_LIBRARY ${name})
      mark_as_advanced(TransferEngine_${name}_INCLUDE_DIR TransferEngine_${name}_LIBRARY)
      if(TransferEngine_${name}_INCLUDE_DIR AND TransferEngine_${name}_LIBRARY)
        set_target_properties(${target} PROPERTIES
          INTERFACE_LINK_LIBRARIES "${TransferEngine_${name}_LIBRARY}"
          INTERFACE_INCLUDE_DIRECTORIES "${TransferEngine_${name}_INCLUDE_DIR}")
        set(found TRUE)
      endif()
    endif()
  endif()
  if(NOT found)
    string(TOUPPER ${name} upper_name)
    set_target_properties(${target} PROPERTIES INTERFACE_COMPILE_DEFINITIONS TRANSFER_ENGINE_WITHOUT_${upper_name})
  endif()
  set(TransferEngine_mooncake_${name}_FOUND ${found} PARENT_SCOPE)
endfunction()

_transfer_engine_find(glog glog/logging.h glog::glog glog)
_transfer_engine_find(jsoncpp json/json.h JsonCpp::JsonCpp jsoncpp_lib jsoncpp_static)
_transfer_engine_find(numa numa.h)
