# What programs that use upstream's headers expect to come along: glog, jsoncpp and libnuma, each where it is found.
#
# For each there is a target TransferEngine::mooncake_<name> and TransferEngine_mooncake_<name>_FOUND. If it is not found, or
# CMAKE_DISABLE_FIND_PACKAGE_<name> is set, the target has the headers do without.

# Further arguments are names of its targets, which a project may have already.
function(_transfer_engine_find name header)
  set(target TransferEngine::mooncake_${name})
  if(NOT TARGET ${target})
    add_library(${target} INTERFACE IMPORTED)
  endif()
  set(TransferEngine_mooncake_${name}_FOUND TRUE PARENT_SCOPE)
  if(NOT CMAKE_DISABLE_FIND_PACKAGE_${name})
    foreach(candidate IN LISTS ARGN)
      if(TARGET ${candidate})
        set_target_properties(${target} PROPERTIES INTERFACE_LINK_LIBRARIES ${candidate})
        return()
      endif()
    endforeach()
    find_path(TransferEngine_${name}_INCLUDE_DIR ${header} PATH_SUFFIXES ${name})
    find_library(TransferEngine_${name}_LIBRARY ${name})
    mark_as_advanced(TransferEngine_${name}_INCLUDE_DIR TransferEngine_${name}_LIBRARY)
    if(TransferEngine_${name}_INCLUDE_DIR AND TransferEngine_${name}_LIBRARY)
      set_target_properties(${target} PROPERTIES
        INTERFACE_LINK_LIBRARIES "${TransferEngine_${name}_LIBRARY}"
        INTERFACE_INCLUDE_DIRECTORIES "${TransferEngine_${name}_INCLUDE_DIR}")
      return()
    endif()
  endif()
  set(TransferEngine_mooncake_${name}_FOUND FALSE PARENT_SCOPE)
  string(TOUPPER ${name} upper_name)
  set_target_properties(${target} PROPERTIES INTERFACE_COMPILE_DEFINITIONS TRANSFER_ENGINE_WITHOUT_${upper_name})
endfunction()

# Recent versions of glog insist on the definitions of their package. That of jsoncpp bears being asked for only once, by the project.
find_package(glog CONFIG QUIET)
_transfer_engine_find(glog glog/logging.h glog::glog)
_transfer_engine_find(jsoncpp json/json.h JsonCpp::JsonCpp jsoncpp_lib jsoncpp_static)
_transfer_engine_find(numa numa.h)
